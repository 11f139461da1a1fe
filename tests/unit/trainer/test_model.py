"""The model against plain transformers: log-probabilities, gradients, names, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from fourstroke.errors import ConfigError, ModelNotFoundError, RunFolderError
from fourstroke.trainer.model import PolicyModel
from fourstroke.trainer.packing import Packed, assemble

CPU = torch.device("cpu")
ROWS = [list(range(3, 12)), [250, 7, 7, 90], [5, 6, 8, 13, 21, 34, 55, 89, 144, 233]]
NUM_PROMPT = 3


def load(path: Path, dtype: torch.dtype = torch.float64) -> PolicyModel:
    return PolicyModel.load(path, compute_dtype=dtype, device=CPU)


def packed(rows: list[list[int]]) -> tuple[Packed, np.ndarray, np.ndarray]:
    """Rows in one, with all tokens after their prompts as targets."""
    together = assemble([np.array(row) for row in rows])
    sources = [slots[NUM_PROMPT - 1 : -1] for slots in together.slots]
    targets = [np.array(row[NUM_PROMPT:]) for row in rows]
    return together, np.concatenate(sources), np.concatenate(targets)


def plain_logprobs(path: Path, rows: list[list[int]], temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One unpadded row at a time through transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    logprobs, entropies = [], []
    for row in rows:
        all_TV = torch.log_softmax(model(torch.tensor([row])).logits[0].to(dtype) / temperature, -1)
        for position in range(NUM_PROMPT, len(row)):
            at_V = all_TV[position - 1]
            logprobs.append(at_V[row[position]])
            entropies.append(-(at_V.exp() * at_V).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("is_tied", [True, False])
def test_log_probabilities_equal_unpadded_transformers(
    write_model: Callable[..., Path],
    tmp_path: Path,
    dtype: torch.dtype,
    tolerance: float,
    temperature: float,
    is_tied: bool,
) -> None:
    path = write_model(tmp_path / "model", is_tied=is_tied)
    expected_N, expected_entropy_N = plain_logprobs(path, ROWS, temperature, dtype)

    logprobs_N, entropy_N = load(path, dtype).token_logprobs(*packed(ROWS), temperature=temperature)

    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy_N, expected_entropy_N, rtol=0, atol=tolerance * 10)


def gradients_of(model: PolicyModel, batches: list[tuple[Packed, np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    """The gradient of the sum of squared log-probabilities, which weighs every token differently; cleared after."""
    for batch in batches:
        model.token_logprobs(*batch, temperature=0.8)[0].square().sum().backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, master in model.masters.items():
        assert master.grad is not None
        found[name] = master.grad.clone()
        master.grad.zero_()
    return found


# Transformers computes its norms in fp32 whatever the type of the model, so float64 agrees to a part in 10 million.
# Three levels, ragged, a row of one token after its prompt, one row twice, and one that is another's beginning.
SHARED = [[3, 4, 5, *tail] for tail in ([6], [6, 7, 8], [6, 7, 9, 10, 11], [20, 21], [20, 22, 23], [20, 21])]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-6)])
@pytest.mark.parametrize(
    "cut",
    [[ROWS], [ROWS[::-1]], [ROWS[:2], ROWS[2:]], [SHARED], [SHARED[:3], SHARED[3:]], [ROWS + SHARED], [SHARED + ROWS]],
)
def test_gradient_does_not_depend_on_packing_or_on_the_cut(
    tiny_llama: Path, cut: list[list[list[int]]], dtype: torch.dtype, tolerance: float
) -> None:
    model = load(tiny_llama, dtype)
    one_by_one = gradients_of(model, [packed([row]) for part in cut for row in part])
    found = gradients_of(model, [packed(part) for part in cut])
    for name, gradient in one_by_one.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() > 0, name


def plain_gradients(path: Path, rows: list[list[int]]) -> dict[str, Tensor]:
    """The same gradient through transformers' own attention, one unpadded row at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for row in rows:
        logprobs_TV = torch.log_softmax(model(torch.tensor([row])).logits[0] / 0.8, -1)
        picked = logprobs_TV[range(NUM_PROMPT - 1, len(row) - 1), row[NUM_PROMPT:]]
        picked.square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_gradient_of_packed_rows_is_that_of_plain_transformers(tiny_llama: Path) -> None:
    found = gradients_of(load(tiny_llama), [packed(SHARED + ROWS)])
    expected = plain_gradients(tiny_llama, SHARED + ROWS)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_a_model_with_a_sliding_window_sees_no_further(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    expected = plain_gradients(tmp_path / "mistral", SHARED + ROWS)
    found = gradients_of(load(tmp_path / "mistral"), [packed(SHARED + ROWS)])
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_bfloat16_gradients_are_added_up_in_float32(tiny_llama: Path) -> None:
    """Three equal micro-batches give three times one of them, where a bf16 sum would be rounded to 1 part in 256."""
    model = load(tiny_llama, torch.bfloat16)
    once = gradients_of(model, [packed(ROWS)])
    thrice = gradients_of(model, [packed(ROWS)] * 3)
    exact = gradients_of(load(tiny_llama), [packed(ROWS)])
    for name, gradient in once.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(thrice[name], gradient * 3, rtol=1e-6, atol=0)
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact[name].flatten().float(), dim=0)
        assert cosine > 0.99, (name, cosine)


def test_the_working_model_follows_the_masters(tiny_llama: Path) -> None:
    model = load(tiny_llama, torch.bfloat16)
    stored = load_file(tiny_llama / "model.safetensors")
    for name, master in model.masters.items():
        assert torch.equal(master.data, stored[name]), "masters hold the checkpoint's fp32 values"
        master.data.add_(0.25)
    before = model.token_logprobs(*packed(ROWS), temperature=1.0)[0]
    model.refresh()
    after = model.token_logprobs(*packed(ROWS), temperature=1.0)[0]

    assert not torch.equal(before, after)
    for name, tensor in model.tensors(lambda _: torch.bfloat16):
        assert torch.equal(tensor, model.masters[name].detach().to(torch.bfloat16))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_the_masters_rounded_once(tiny_llama: Path, compute: torch.dtype, wanted: torch.dtype) -> None:
    stored = load_file(tiny_llama / "model.safetensors")
    found = dict(load(tiny_llama, compute).tensors(lambda _: wanted))
    assert list(found) == sorted(stored)
    for name, tensor in found.items():
        assert tensor.dtype == wanted
        assert not tensor.requires_grad
        assert torch.equal(tensor, stored[name].to(wanted))


@pytest.mark.parametrize("is_tied", [True, False])
def test_names_are_the_checkpoints(write_model: Callable[..., Path], tmp_path: Path, is_tied: bool) -> None:
    model = load(write_model(tmp_path / "model", is_tied=is_tied), torch.bfloat16)
    assert ("lm_head.weight" in model.stored_dtypes) is not is_tied
    assert model.shapes["model.embed_tokens.weight"] == (257, 64)
    assert len(model.masters) == len(model.stored_dtypes)


def test_a_tied_head_that_the_checkpoint_holds_is_published(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "both"
    path.mkdir()
    tensors = load_file(tiny_llama / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    (path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())

    model = load(path, torch.bfloat16)
    assert len(model.masters) == len(model.stored_dtypes) - 1
    next(iter(model.masters.values())).data.add_(1.0)
    model.refresh()
    found = dict(model.tensors(lambda _: torch.float32))

    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_in_transformers(
    write_model: Callable[..., Path], tmp_path: Path, compute: torch.dtype
) -> None:
    path = write_model(tmp_path / "model", dtype=torch.bfloat16)
    model = load(path, compute)
    for master in model.masters.values():
        master.data.mul_(1.5)
    model.refresh()

    model.export(tmp_path / "out" / "saved")

    saved = tmp_path / "out" / "saved"
    assert sorted(p.name for p in saved.iterdir()) == sorted(p.name for p in path.iterdir())
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert again.dtype == torch.bfloat16
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.masters[name].detach().to(torch.bfloat16)), name
    with pytest.raises(RunFolderError, match="never written over"):
        model.export(saved)


def test_a_save_that_fails_leaves_nothing_in_place(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("fourstroke.trainer.model.save_file", fail)
    model = load(tiny_llama, torch.float32)
    with pytest.raises(OSError, match="no space"):
        model.export(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()

    monkeypatch.undo()
    model.export(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def broken(tiny_llama: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    folder.mkdir()
    save_file(change(load_file(tiny_llama / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    return folder


@pytest.mark.filterwarnings("ignore")  # transformers' own report of the damage
def test_a_checkpoint_that_is_not_whole_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    lacking = broken(
        tiny_llama, tmp_path / "lacking", lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}
    )
    with pytest.raises(ModelNotFoundError, match=r"lacks the tensor 'model.norm.weight'"):
        load(lacking)
    strange = broken(tiny_llama, tmp_path / "strange", lambda t: {**t, "model.extra": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"holds 'model.extra'"):
        load(strange)
    quantised = broken(tiny_llama, tmp_path / "quantised", lambda t: {**t, "model.q": torch.zeros(2, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"'model.q' is stored as I8"):
        load(quantised)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"holds no .safetensors file"):
        load(tmp_path / "empty")


@pytest.mark.parametrize(
    ("attn_logit_softcapping", "reason"), [(None, "a soft cap"), (50.0, r"gemma: its attention has softcap = 50\.0")]
)
def test_a_model_that_changes_its_logits_or_its_scores_is_refused(
    tmp_path: Path, attn_logit_softcapping: float | None, reason: str
) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, initializer_range=0.5,
        attn_logit_softcapping=attn_logit_softcapping,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path / "gemma", torch.float32)
