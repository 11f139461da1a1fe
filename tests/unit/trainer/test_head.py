"""The chunked head against all logits at once, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fourstroke.trainer.head import token_logprobs


def parts(num_tokens: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num_tokens, 5, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    targets_N = torch.randint(0, 11, (num_tokens,), generator=generator)
    return hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), targets_N


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_equals_log_softmax_of_all_logits(chunk: int, temperature: float) -> None:
    hidden_NH, weight_VH, targets_N = parts()
    expected_NV = torch.log_softmax(hidden_NH @ weight_VH.T / temperature, -1)

    logprobs_N, entropy_N = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=temperature, chunk=chunk)

    torch.testing.assert_close(logprobs_N, expected_NV.gather(-1, targets_N[:, None])[:, 0], rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy_N, -(expected_NV.exp() * expected_NV).sum(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)])
def test_gradients_equal_those_of_log_softmax(chunk: int, asked: tuple[bool, bool]) -> None:
    """Of logprob and entropy together and of each alone; which is asked for decides what is computed."""
    hidden_NH, weight_VH, targets_N = parts()
    scales = [torch.linspace(-1, 2, 7, dtype=torch.float64), torch.linspace(3, -2, 7, dtype=torch.float64)]

    def gradients(values: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        total = sum((s * v).sum() for s, v, is_asked in zip(scales, values, asked, strict=True) if is_asked)
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, (hidden_NH, weight_VH))

    all_NV = torch.log_softmax(hidden_NH @ weight_VH.T / 0.7, -1)
    expected = gradients((all_NV.gather(-1, targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(-1)))

    found = gradients(token_logprobs(hidden_NH, weight_VH, targets_N, temperature=0.7, chunk=chunk))

    for found_gradient, expected_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(found_gradient, expected_gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [2, 100])
def test_gradient_equals_finite_differences(chunk: int) -> None:
    hidden_NH, weight_VH, targets_N = parts()

    def logprobs_of(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        return token_logprobs(hidden_NH, weight_VH, targets_N, temperature=0.7, chunk=chunk)[0]

    assert torch.autograd.gradcheck(logprobs_of, (hidden_NH, weight_VH))


def test_bfloat16_gives_float32_and_its_own_gradient_type() -> None:
    hidden_NH, weight_VH, targets_N = parts(dtype=torch.bfloat16)
    logprobs_N, entropy_N = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)
    logprobs_N.sum().backward()  # type: ignore[no-untyped-call]

    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    assert hidden_NH.grad is not None
    assert weight_VH.grad is not None
    assert hidden_NH.grad.dtype == weight_VH.grad.dtype == torch.bfloat16


def test_no_tokens() -> None:
    hidden_NH, weight_VH, targets_N = parts(num_tokens=0)
    assert token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)[0].shape == (0,)
