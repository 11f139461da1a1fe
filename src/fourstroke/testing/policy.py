"""A tiny real policy for tests: a model that changes, publishes itself, and says what an engine's numbers must be.

Stands where a trainer would, without an optimiser: ``nudge`` moves the weights. The log-probabilities are those of a
full forward pass in fp32 by Transformers, independent of any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fourstroke.types import Publication
from fourstroke.weights.manifest import checkpoint_shapes
from fourstroke.weights.publish import Publisher, TensorSpec

if TYPE_CHECKING:
    from fourstroke.engines.vllm import VllmEngine


class TinyPolicy:
    """A model out of a folder, in fp32, and the shared file that it publishes into.

    Args:
        model_path: Folder in Hugging Face format.
        publication_path: The file; its name must be free.
        dtype: Published type.

    Example:
        >>> policy = TinyPolicy(tiny_model(folder), publication_path=folder / "shm")  # doctest: +SKIP
        >>> policy.nudge(1)  # doctest: +SKIP
        >>> await engine.update_weights(policy.publish(1))  # doctest: +SKIP
    """

    def __init__(self, model_path: Path, *, publication_path: Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.shapes = checkpoint_shapes(model_path)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in self.shapes.items()]
        self.publisher = Publisher(publication_path, entries=specs)

    def nudge(self, seed: int, *, scale: float = 0.02) -> None:
        """Add noise to every weight, enough to be seen in every log-probability."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)

    def publish(self, number: int) -> Publication:
        """Publish the weights as they are now."""
        weights = self.model.state_dict()
        return self.publisher.publish(number, ((name, weights[name]) for name in self.shapes), incarnation=0)

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int], *, temperature: float) -> np.ndarray:
        """float32 [T]: ``log_softmax(logits / temperature)`` at each of ``ids`` after the prompt, in one forward."""
        import torch

        with torch.no_grad():
            row_T = torch.tensor([[*map(int, prompt_ids), *map(int, ids)]])
            logits_TV = self.model(row_T).logits[0, len(prompt_ids) - 1 : -1]
            logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
            picked_T = logprobs_TV.gather(1, row_T[0, len(prompt_ids) :, None])[:, 0]
        numbers_T: np.ndarray = picked_T.numpy()
        return numbers_T

    def close(self) -> None:
        """Unlink the shared file."""
        self.publisher.close()


async def until_sampled_by(engine: VllmEngine, request: asyncio.Task[Any], *, num_tokens: int) -> None:
    """Wait until some completion has so many tokens more than now, or the request is done.

    A fixed time is too long for one machine and too short for the next.
    """
    llm = engine._llm  # noqa: SLF001 (vLLM tells of nothing before a completion is whole)
    assert llm is not None

    def most() -> int:
        states = llm.output_processor.request_states.values()
        return max((state.detokenizer.num_output_tokens() for state in states), default=0)

    goal = most() + num_tokens
    while most() < goal and not request.done():  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.001)
