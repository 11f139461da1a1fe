"""Attention over packed rows that share beginnings: each token sees the tokens before it on its own path, no others.

Registered with Transformers under :data:`NAME`; the model hands the layout through to each of its layers. On CPU,
segments are batched by like lengths and padded within attention alone (``SegmentLayout``); on a GPU one block mask over
the packed row says which tiles to skip (``BlockMaskLayout``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fourstroke.errors import ConfigError
from fourstroke.trainer.packing import Segment

NAME = "fourstroke_packed"


class Layout(Protocol):
    """How the tokens of one packed row see each other."""

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention [T, H, D]; with fewer key heads than query heads, each serves as many in turn.

        Args:
            query_THD: Queries of the packed row's tokens.
            key_TKD: Keys of the same.
            value_TKD: Values of the same.
            scale: Factor of the scores; one over the root of D if not given.
            window: How many tokens a token sees at most, itself counted; all before it if not given.
        """


def layout_of(segments: Sequence[Segment], *, device: torch.device) -> Layout:
    """The layout that suits the device."""
    return (BlockMaskLayout if device.type == "cuda" else SegmentLayout)(segments, device=device)


def paths_of(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Of each segment, the segments that it sees whole, from the root, and itself last.

    Example:
        >>> paths_of([Segment(start=0, stop=2, parent=-1), Segment(start=2, stop=3, parent=0)])
        [(0,), (0, 1)]
    """
    paths: list[tuple[int, ...]] = []
    for number, segment in enumerate(segments):
        paths.append((*(paths[segment.parent] if segment.parent >= 0 else ()), number))
    return paths


# --- on CPU -----------------------------------------------------------------------------------------------------------


class SegmentLayout:
    """Batches of segments of like lengths, each padded to its longest within attention alone.

    Padding is seen by no token, and what padding itself sees is read by none.

    Args:
        segments: The tree, as ``packing.assemble`` gives it.
        device: Where the tensors lie.
    """

    def __init__(self, segments: Sequence[Segment], *, device: torch.device) -> None:
        """Lay out; the tensors serve every layer."""
        paths = paths_of(segments)
        keys = [np.concatenate([np.arange(segments[at].start, segments[at].stop) for at in path]) for path in paths]

        def likeness(number: int) -> tuple[bool, int, int]:
            num_queries, num_keys = segments[number].num_tokens, len(keys[number])
            return num_queries < num_keys, num_keys.bit_length(), num_queries.bit_length()

        self._batches: list[_SegmentBatch] = []
        places_T = np.empty(sum(segment.num_tokens for segment in segments), dtype=np.int64)
        num_places = 0
        for _, alike in itertools.groupby(sorted(range(len(segments)), key=likeness), key=likeness):
            members = list(alike)
            batch = _SegmentBatch([segments[at] for at in members], [keys[at] for at in members], device=device)
            for row, number in enumerate(members):
                segment, first = segments[number], num_places + row * batch.num_queries
                places_T[segment.start : segment.stop] = np.arange(first, first + segment.num_tokens)
            num_places += len(members) * batch.num_queries
            self._batches.append(batch)
        self._places = torch.from_numpy(places_T).to(device)

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention [T, H, D]. The gradient of a key that many segments see is added up in fp32."""
        wide = torch.promote_types(key_TKD.dtype, torch.float32)
        key_TKD, value_TKD = key_TKD.to(wide), value_TKD.to(wide)
        parts = [batch.attend(query_THD, key_TKD, value_TKD, scale=scale, window=window) for batch in self._batches]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, self._places)


class _SegmentBatch:
    """Segments that attend together. ``keys`` gives the packed tokens of each one's path, itself included."""

    def __init__(self, segments: Sequence[Segment], keys: Sequence[np.ndarray], *, device: torch.device) -> None:
        num_queries_S = np.array([segment.num_tokens for segment in segments])
        self._num_keys_S = np.array([len(seen) for seen in keys])
        self._num_before_S = self._num_keys_S - num_queries_S
        self.num_queries = int(num_queries_S.max())
        self._device = device
        self._masks: dict[int | None, Tensor | None] = {}
        queries_SQ = np.zeros((len(segments), self.num_queries), dtype=np.int64)
        keys_SK = np.zeros((len(segments), self._num_keys_S.max()), dtype=np.int64)
        for row, (segment, seen) in enumerate(zip(segments, keys, strict=True)):
            queries_SQ[row, : segment.num_tokens] = np.arange(segment.start, segment.stop)
            keys_SK[row, : len(seen)] = seen
        self._queries_SQ, self._keys_SK = (torch.from_numpy(each).to(device) for each in (queries_SQ, keys_SK))

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of the queries, padding included: [S * Q, H, D]."""
        dtype, mask = query_THD.dtype, self._mask(window)
        attended_SHQD = scaled_dot_product_attention(
            _taken(query_THD, self._queries_SQ, dtype=dtype),
            _taken(key_TKD, self._keys_SK, dtype=dtype),
            _taken(value_TKD, self._keys_SK, dtype=dtype),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        )
        return attended_SHQD.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor | None:
        """Booleans [S, 1, Q, K], or none where plain causal order is right: for whole rows, padded at their ends."""
        if window not in self._masks:
            num_keys = self._keys_SK.shape[1]
            is_plain = not self._num_before_S.any() and (window is None or window >= num_keys)
            self._masks[window] = None if is_plain else torch.from_numpy(self._sees(num_keys, window)).to(self._device)
        return self._masks[window]

    def _sees(self, num_keys: int, window: int | None) -> np.ndarray:
        # A key's place on the path is its position in the row, and a query's is behind all that come before.
        key_K = np.arange(num_keys)
        query_SQ1 = (self._num_before_S[:, None] + np.arange(self.num_queries))[:, :, None]
        sees_SQK = (key_K <= query_SQ1) & (key_K < self._num_keys_S[:, None, None])
        if window is not None:
            # A padded query may lie behind every window; it must see something, for a softmax over nothing is NaN.
            is_real_SQ1 = query_SQ1 < self._num_keys_S[:, None, None]
            sees_SQK &= (key_K > query_SQ1 - window) | ~is_real_SQ1
        sees_S1QK: np.ndarray = sees_SQK[:, None]
        return sees_S1QK


def _taken(values: Tensor, places_SL: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Values [T, heads, D] at the places, as [S, heads, L, D]."""
    taken_NHD = values.index_select(0, places_SL.flatten()).to(dtype)
    return taken_NHD.view(*places_SL.shape, *values.shape[1:]).transpose(1, 2)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


class BlockMaskLayout:
    """One mask over the packed row, by tiles; torch's flex attention computes only the tiles that hold anything.

    Args:
        segments: The tree, as ``packing.assemble`` gives it.
        device: Where the tensors lie.
        is_compiled: Off runs the same mask through the uncompiled form, which is slow and holds every score.
    """

    def __init__(self, segments: Sequence[Segment], *, device: torch.device, is_compiled: bool = True) -> None:
        """Lay out; masks are made when a layer first asks."""
        segment_T = np.repeat(np.arange(len(segments)), [each.num_tokens for each in segments])
        sees_SS = np.zeros((len(segments), len(segments)), dtype=np.bool_)
        depth_S = np.zeros(len(segments), dtype=np.int64)
        for number, path in enumerate(paths_of(segments)):
            sees_SS[number, list(path)] = True
            depth_S[number] = sum(segments[at].num_tokens for at in path[:-1]) - segments[number].start
        positions_T = np.arange(len(segment_T)) + depth_S[segment_T]
        self._segment_T, self._sees_SS, self._positions_T = (
            torch.from_numpy(each).to(device) for each in (segment_T, sees_SS, positions_T)
        )
        self._is_compiled = is_compiled
        self._masks: dict[int | None, Any] = {}

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention [T, H, D]."""
        attended: Tensor = _flex_attention(is_compiled=self._is_compiled)(
            *(values.transpose(0, 1)[None] for values in (query_THD, key_TKD, value_TKD)),
            block_mask=self._mask(window),
            scale=scale,
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        )
        return attended[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        segment_T, sees_SS, positions_T = self._segment_T, self._sees_SS, self._positions_T

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Depth first, so what comes before a token on its path comes before it in the packed row too.
            seen = (key <= query) & sees_SS[segment_T[query], segment_T[key]]
            return seen if window is None else seen & (positions_T[key] > positions_T[query] - window)

        if window not in self._masks:
            length = len(segment_T)
            self._masks[window] = create_block_mask(sees, None, None, length, length, device=str(segment_T.device))
        return self._masks[window]


@functools.cache
def _flex_attention(*, is_compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention


# --- what Transformers calls ------------------------------------------------------------------------------------------


def _packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the layout says all)
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D].

    Raises:
        ConfigError: The model changes its scores in a way that is not computed here.
    """
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise ConfigError(
                f"its attention has {name} = {others[name]}, which the trainer does not compute; choose another model"
            )
    query_THD, key_TKD, value_TKD = (values[0].transpose(0, 1) for values in (query, key, value))
    return layout.attend(query_THD, key_TKD, value_TKD, scale=scaling, window=sliding_window)[None], None


AttentionInterface.register(NAME, _packed_attention)
