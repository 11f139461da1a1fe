"""Finished groups, handed out in admission order within a window, each exactly once.

    expect(key) --> put(record) --> take(P)
               '--> forget(key)

    h         the oldest group that was not taken
    [h, h+W)  the window: of these, finished groups are taken, oldest first; nothing later is

With W = 1 a group that is not finished holds back all later ones, so that the order of training does not depend on who
finished first. A wider window lets W - 1 groups overtake. What is not taken stays for the next step: nothing finished
is ever thrown away here.
"""

from __future__ import annotations

import asyncio
import itertools

from fourstroke.types import GroupRecord


class GroupBuffer:
    """Groups between roll out and batch.

    Args:
        window: W, in groups.

    Example:
        >>> buffer = GroupBuffer(window=1)
        >>> buffer.expect("e0000-i000000")
        >>> await buffer.put(record)  # doctest: +SKIP
        >>> (record,) = await buffer.take(1)  # doctest: +SKIP
    """

    def __init__(self, *, window: int) -> None:
        self._window = window
        self._num_admitted = 0
        # Insertion order is admission order; the number is that of the admission. None stands for an unfinished group.
        self._groups: dict[str, tuple[int, GroupRecord | None]] = {}
        self._changed = asyncio.Condition()

    def expect(self, key: str) -> None:
        """A draw was admitted; its place in the order is now."""
        assert key not in self._groups, key
        self._groups[key] = (self._num_admitted, None)
        self._num_admitted += 1

    async def put(self, group: GroupRecord) -> None:
        """The group of an expected draw is finished."""
        number, before = self._groups[group.id]
        assert before is None, group.id
        async with self._changed:
            self._groups[group.id] = (number, group)
            self._changed.notify_all()

    async def forget(self, key: str) -> None:
        """An expected draw was dropped before it was finished."""
        assert self._groups[key][1] is None, key
        async with self._changed:
            del self._groups[key]
            self._changed.notify_all()

    async def take(self, num_groups: int) -> list[GroupRecord]:
        """``num_groups`` finished groups of the window, oldest admitted first, once there are so many."""
        taken: list[GroupRecord] = []
        async with self._changed:
            while len(taken) < num_groups:
                await self._changed.wait_for(lambda: self._next() is not None)
                group = self._next()
                assert group is not None
                del self._groups[group.id]
                taken.append(group)
        return sorted(taken, key=lambda group: group.draw.key)

    def _next(self) -> GroupRecord | None:
        """The oldest finished group of the window."""
        if not self._groups:
            return None
        oldest, _ = next(iter(self._groups.values()))
        in_window = itertools.takewhile(lambda entry: entry[0] < oldest + self._window, self._groups.values())
        return next((group for _, group in in_window if group is not None), None)
