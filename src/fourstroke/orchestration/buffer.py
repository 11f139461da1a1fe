"""Finished groups, handed out oldest admitted first, each exactly once.

    expect(key) --> put(group) --> take(P)
               '--> forget(key)

A group that is admitted earlier but not finished holds back the later ones, so that the order of training does not
depend on who finished first.
"""

from __future__ import annotations

import asyncio

from fourstroke.types import Group


class GroupBuffer:
    """Groups between roll out and batch, in admission order.

    Example:
        >>> async def empty() -> int:
        ...     buffer = GroupBuffer()
        ...     buffer.expect("e0000-i000000")
        ...     await buffer.forget("e0000-i000000")
        ...     return buffer.num_expected
        >>> asyncio.run(empty())
        0
    """

    def __init__(self) -> None:
        # Insertion order is admission order. None stands for a group that is still being rolled out.
        self._groups: dict[str, Group | None] = {}
        self._changed = asyncio.Condition()

    @property
    def num_expected(self) -> int:
        """Groups admitted and neither taken nor forgotten."""
        return len(self._groups)

    def expect(self, key: str) -> None:
        """A draw was admitted; its place in the order is now."""
        assert key not in self._groups, key
        self._groups[key] = None

    async def put(self, group: Group) -> None:
        """The group of an expected draw is finished."""
        assert self._groups.get(group.id, group) is None, group.id
        async with self._changed:
            self._groups[group.id] = group
            self._changed.notify_all()

    async def forget(self, key: str) -> None:
        """An expected draw was dropped."""
        assert self._groups.get(key, key) is None, key
        async with self._changed:
            del self._groups[key]
            self._changed.notify_all()

    async def take(self, num_groups: int) -> list[Group]:
        """The ``num_groups`` oldest admitted groups, once they are all finished."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._oldest(num_groups)) == num_groups)
            taken = self._oldest(num_groups)
            for group in taken:
                del self._groups[group.id]
            return taken

    def _oldest(self, num_groups: int) -> list[Group]:
        """Finished groups up to the first unfinished one, at most ``num_groups``."""
        ready = []
        for group in list(self._groups.values())[:num_groups]:
            if group is None:
                break
            ready.append(group)
        return ready
