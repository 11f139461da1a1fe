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

    Padding is seen by no token, and what padding itself sees is read by none. All is computed in fp32, which on a CPU
    is as fast as bfloat16 for matrices of this size, and probabilities are computed again in the backward pass, so that
    nothing is kept but the packed queries, keys and values.

    Args:
        segments: The tree, as ``packing.assemble`` gives it.
        device: Where the tensors lie.
    """

    def __init__(self, segments: Sequence[Segment], *, device: torch.device) -> None:
        """Lay out; the tensors serve every layer."""
        paths = paths_of(segments)
        keys = [np.concatenate([np.arange(segments[at].start, segments[at].stop) for at in path]) for path in paths]

        def likeness(number: int) -> tuple[int, int]:
            return len(keys[number]).bit_length(), segments[number].num_tokens.bit_length()

        self.batches: list[_SegmentBatch] = []
        num_tokens, num_places = segments[-1].stop, 0
        places_T = np.empty(num_tokens, dtype=np.int64)
        for _, alike in itertools.groupby(sorted(range(len(segments)), key=likeness), key=likeness):
            members = list(alike)
            batch = _SegmentBatch(
                [segments[at] for at in members], [keys[at] for at in members], num_tokens=num_tokens, device=device
            )
            for row, number in enumerate(members):
                segment, first = segments[number], num_places + row * batch.num_queries
                places_T[segment.start : segment.stop] = np.arange(first, first + segment.num_tokens)
            num_places += len(members) * batch.num_queries
            self.batches.append(batch)
        # Of each packed token, its place among the queries of all batches, padding included.
        self.places = torch.from_numpy(places_T).to(device)
        self.keys = torch.cat([batch.keys for batch in self.batches])

    def attend(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention [T, H, D]. The gradient of a key that many segments see is added up in fp32."""
        scale = query_THD.shape[-1] ** -0.5 if scale is None else scale
        attended: Tensor = _SegmentAttention.apply(query_THD, key_TKD, value_TKD, self, scale, window)  # type: ignore[no-untyped-call]
        return attended


class _SegmentBatch:
    """S segments that attend together.

    Attributes:
        num_queries: Of the longest segment (Q).
        queries: int64 [S * Q], which packed token each query is; padding is one past the last, where zeros are put.
        keys: int64 [S * L], the same of the keys: each segment's path, itself included, L the longest; padding is 0.
    """

    def __init__(
        self, segments: Sequence[Segment], keys: Sequence[np.ndarray], *, num_tokens: int, device: torch.device
    ) -> None:
        num_queries_S = np.array([segment.num_tokens for segment in segments])
        self._num_keys_S = np.array([len(seen) for seen in keys])
        self._num_before_S = self._num_keys_S - num_queries_S
        self._device = device
        self._hidden: dict[int | None, Tensor] = {}
        self.num_queries = int(num_queries_S.max())
        queries_SQ = np.full((len(segments), self.num_queries), num_tokens, dtype=np.int64)
        keys_SL = np.zeros((len(segments), self._num_keys_S.max()), dtype=np.int64)
        for row, (segment, seen) in enumerate(zip(segments, keys, strict=True)):
            queries_SQ[row, : segment.num_tokens] = np.arange(segment.start, segment.stop)
            keys_SL[row, : len(seen)] = seen
        self.queries, self.keys = (torch.from_numpy(each.ravel()).to(device) for each in (queries_SQ, keys_SL))

    def probabilities(self, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Softmax of the scores [S * K, G * Q, L], for queries that are scaled already; both as :meth:`taken` gives."""
        scores = torch.bmm(query, key.mT)
        hidden_S11QL = self._hidden_from(window, num_keys=key.shape[1])
        scores.view(
            len(self._num_keys_S), -1, query.shape[1] // self.num_queries, *hidden_S11QL.shape[-2:]
        ).masked_fill_(hidden_S11QL, -torch.inf)
        return scores.softmax(-1)

    def taken(self, values_TKD: Tensor, places: Tensor, *, num_groups: int, dtype: torch.dtype) -> Tensor:
        """Values of K * G heads at the places of S segments, as [S * K, G * places each, D], in ``dtype``."""
        num_segments, (_, num_heads, width) = len(self._num_keys_S), values_TKD.shape
        taken = values_TKD.flatten(1).index_select(0, places).to(dtype)
        by_head = taken.view(num_segments, -1, num_heads // num_groups, num_groups, width).permute(0, 2, 3, 1, 4)
        return by_head.reshape(num_segments * (num_heads // num_groups), -1, width)

    def given(self, values: Tensor, *, num_groups: int, num_heads: int) -> Tensor:
        """The reverse of :meth:`taken`: [S * places each, K * G, D]."""
        num_segments, width = len(self._num_keys_S), values.shape[-1]
        by_head = values.view(num_segments, num_heads // num_groups, num_groups, -1, width)
        return by_head.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, width)

    def _hidden_from(self, window: int | None, *, num_keys: int) -> Tensor:
        """Booleans [S, 1, 1, Q, L]: which keys each query does not see."""
        if window not in self._hidden:
            # A key's place on the path is its position in the row, and a query's is behind all that come before.
            key_L = np.arange(num_keys)
            query_SQ1 = (self._num_before_S[:, None] + np.arange(self.num_queries))[:, :, None]
            num_keys_S11 = self._num_keys_S[:, None, None]
            hidden_SQL = (key_L > query_SQ1) | (key_L >= num_keys_S11)
            if window is not None:
                # A padded query may lie behind every window; it must see something, for a softmax of nothing is NaN.
                hidden_SQL |= (key_L <= query_SQ1 - window) & (query_SQ1 < num_keys_S11)
            self._hidden[window] = torch.from_numpy(hidden_SQL[:, None, None]).to(self._device)
        return self._hidden[window]


class _SegmentAttention(torch.autograd.Function):
    """With p = softmax(q k') and o = p v: dv = p' do, ds = p (do v' - rowsum(p do v')), dq = ds k, dk = ds' q."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        layout: SegmentLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query_THD, key_TKD, value_TKD)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        wide = torch.promote_types(query_THD.dtype, torch.float32)
        num_heads, num_groups = query_THD.shape[1], query_THD.shape[1] // key_TKD.shape[1]
        parts = []
        for batch in layout.batches:
            query = batch.taken(_with_zeros(query_THD), batch.queries, num_groups=num_groups, dtype=wide).mul_(scale)
            key, value = (batch.taken(each, batch.keys, num_groups=1, dtype=wide) for each in (key_TKD, value_TKD))
            attended = torch.bmm(batch.probabilities(query, key, window), value)
            parts.append(batch.given(attended, num_groups=num_groups, num_heads=num_heads))
        return torch.cat(parts).index_select(0, layout.places).to(query_THD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TKD, value_TKD = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        wide = torch.promote_types(query_THD.dtype, torch.float32)
        num_heads, num_key_heads, width = query_THD.shape[1], key_TKD.shape[1], key_TKD.shape[2]
        num_groups = num_heads // num_key_heads
        query_parts, key_parts = [], []
        for batch in layout.batches:
            query = batch.taken(_with_zeros(query_THD), batch.queries, num_groups=num_groups, dtype=wide).mul_(scale)
            key, value = (batch.taken(each, batch.keys, num_groups=1, dtype=wide) for each in (key_TKD, value_TKD))
            grad = batch.taken(_with_zeros(grad_THD), batch.queries, num_groups=num_groups, dtype=wide)
            probabilities = batch.probabilities(query, key, ctx.window)
            grad_value = torch.bmm(probabilities.mT, grad)
            grad_scores = torch.bmm(grad, value.mT).mul_(probabilities)
            grad_scores.sub_(probabilities.mul_(grad_scores.sum(-1, keepdim=True)))
            grad_query = torch.bmm(grad_scores, key).mul_(scale)
            query_parts.append(batch.given(grad_query, num_groups=num_groups, num_heads=num_heads))
            both = (torch.bmm(grad_scores.mT, query), grad_value)
            key_parts.append(
                torch.cat([batch.given(each, num_groups=1, num_heads=num_key_heads).flatten(1) for each in both], -1)
            )
        grad_query_THD = torch.cat(query_parts).index_select(0, layout.places)
        grad_both = grad_query_THD.new_zeros(len(key_TKD), 2 * num_key_heads * width)
        grad_both.index_add_(0, layout.keys, torch.cat(key_parts))
        grad_key, grad_value = grad_both.to(key_TKD.dtype).view(-1, 2, num_key_heads, width).unbind(1)
        return grad_query_THD.to(query_THD.dtype), grad_key, grad_value, None, None, None


def _with_zeros(values_THD: Tensor) -> Tensor:
    """One more token, of zeros, for what is padding among queries."""
    return torch.cat([values_THD, values_THD.new_zeros(1, *values_THD.shape[1:])])


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
