"""Attention over packed rows against a plain softmax, token by token, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourstroke.errors import ConfigError
from fourstroke.trainer import attention
from fourstroke.trainer.attention import BlockMaskLayout, Layout, SegmentLayout
from fourstroke.trainer.packing import Packed, assemble

CPU = torch.device("cpu")
NUM_HEADS, NUM_KEY_HEADS, WIDTH = 4, 2, 8

# Two ids and rows of up to 12 tokens: deep trees, rows of one token, rows that end within another.
trees = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda ids: np.array(ids, dtype=np.int32)),
    min_size=1,
    max_size=7,
).map(assemble)


def random_inputs(packed: Packed, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = len(packed.ids_T)
    query, key, value = (
        torch.randn(length, heads, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    )
    return query, key, value


def by_rows(packed: Packed, inputs: tuple[Tensor, Tensor, Tensor], *, window: int | None) -> Tensor:
    """Each row alone, each of its tokens alone; a token of several rows must come out alike in all of them."""
    query, key, value = inputs
    found: dict[int, Tensor] = {}
    for slots in packed.slots:
        for position, slot in enumerate(slots):
            seen = slots[max(0, position + 1 - window) if window else 0 : position + 1]
            heads = []
            for head in range(NUM_HEADS):
                at = head // (NUM_HEADS // NUM_KEY_HEADS)
                scores = key[seen, at] @ query[slot, head] / WIDTH**0.5
                heads.append(torch.softmax(scores, 0) @ value[seen, at])
            found[int(slot)] = torch.stack(heads)
    return torch.stack([found[slot] for slot in range(len(packed.ids_T))])


def compare(layout: Layout, packed: Packed, *, window: int | None) -> None:
    inputs = random_inputs(packed)
    found = layout.attend(*inputs, scale=None, window=window)
    expected = by_rows(packed, inputs, window=window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(trees, st.sampled_from([None, 1, 3]))
def test_segments_see_their_paths_alone(packed: Packed, window: int | None) -> None:
    compare(SegmentLayout(packed.segments, device=CPU), packed, window=window)


def long_tree() -> Packed:
    """More tokens than a tile of a block mask holds, three levels deep."""
    rng = np.random.default_rng(0)
    root, middles = rng.integers(0, 99, 70), [rng.integers(0, 99, size) for size in (40, 3)]
    leaves = [np.concatenate([root, middle, rng.integers(0, 99, size)]) for middle in middles for size in (1, 30, 17)]
    return assemble([*leaves, rng.integers(0, 99, 50)])


@pytest.mark.parametrize("window", [None, 25])
def test_segments_of_a_long_tree(window: int | None) -> None:
    packed = long_tree()
    compare(SegmentLayout(packed.segments, device=CPU), packed, window=window)


# Uncompiled, flex attention warns that it is slow; torch 2.13, 2026-11-30.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 25])
def test_the_block_mask_of_a_long_tree(window: int | None) -> None:
    packed = long_tree()
    query, key, value = (each.detach() for each in random_inputs(packed))
    layout = BlockMaskLayout(packed.segments, device=CPU, is_compiled=False)
    found = layout.attend(query, key, value, scale=None, window=window)
    torch.testing.assert_close(found, by_rows(packed, (query, key, value), window=window), rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 25])
def test_a_block_mask_on_a_gpu(window: int | None) -> None:
    packed, device = long_tree(), torch.device("cuda")
    inputs = tuple(each.detach().float() for each in random_inputs(packed))
    on_gpu = [each.to(device).requires_grad_() for each in inputs]
    on_cpu = [each.clone().double().requires_grad_() for each in inputs]
    found = attention.layout_of(packed.segments, device=device).attend(*on_gpu, scale=None, window=window)
    expected = by_rows(packed, (on_cpu[0], on_cpu[1], on_cpu[2]), window=window)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=2e-3)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), on_gpu),
        torch.autograd.grad(expected.square().sum(), on_cpu),
        strict=True,
    ):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=1e-2)


def test_the_gradient_of_a_shared_key_is_added_up_in_float32() -> None:
    """256 replies of one prompt: in bfloat16 a sum would stop growing where a part is under 1/256 of it."""
    rows = [np.array([1, 2, 3, 10 + reply]) for reply in range(256)]
    packed = assemble(rows)
    exact = [each.detach().to(torch.bfloat16).double().requires_grad_() for each in random_inputs(packed)]
    rounded = [each.detach().to(torch.bfloat16).requires_grad_() for each in exact]
    layout = SegmentLayout(packed.segments, device=CPU)
    expected, found = (
        torch.autograd.grad(layout.attend(*inputs, scale=None, window=None).sum(), inputs)
        for inputs in (exact, rounded)
    )
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        error = (ours.double() - theirs)[:3].norm() / theirs[:3].norm()
        assert error < 4e-3, error


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_scores_that_are_changed_are_refused(name: str) -> None:
    values = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=f"attention has {name} = 30.0"):
        attention._packed_attention(torch.nn.Identity(), values, values, values, None, layout=None, **{name: 30.0})
