"""Claim: new weights reach the engine in at most twice the time of two warm copies and of the engine's own reload.

    python benchmarks/publish.py

The 135M model in bfloat16 through the real vLLM. A publication is measured from the call of ``publish`` until the
engine runs again; its floor, beside it in the same run, is two copies of the same bytes between warm buffers and vLLM's
own reload of the same tensors from a safetensors file in RAM. Median of 20 ratios. Memory is that of vLLM's core
process and of this one (PSS), after 5 publications and after 50 more.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import report
from safetensors.torch import save_file

from fourstroke.config import process_settings
from fourstroke.engines.vllm import VllmEngine
from fourstroke.observability import tree_pss_bytes
from fourstroke.recipes import quickstart
from fourstroke.trainer.catalogue import resolve_model
from fourstroke.trainer.model import PolicyModel
from fourstroke.weights.publish import Publisher, TensorSpec

CLAIM = "publication: from publish to an engine that runs, at most 2 times two copies and the engine's own reload"
NUM_WARM, NUM_MEASURED, NUM_MORE = 5, 20, 30
SHARED_MEMORY = Path("/dev/shm")


class Bench:
    """The two ends of a publication, and the floor beside them."""

    def __init__(self, folder: Path, model_path: Path) -> None:
        config = quickstart().engine
        self.model = PolicyModel.load(model_path, compute_dtype=torch.bfloat16, device=torch.device("cpu"))
        specs = [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in self.model.shapes.items()]
        self.publisher = Publisher(folder / "weights", entries=specs)
        self.engine = VllmEngine(config, model_path, seed=0, log_path=folder / "engine.log")
        self.copy_of_model = folder / "model"
        shutil.copytree(model_path, self.copy_of_model)
        num_bytes = sum(tensor.nbytes for _, tensor in self.tensors())
        self.buffers = [np.ones(num_bytes, dtype=np.uint8) for _ in range(3)]
        self.number = 0

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The weights as they would be published."""
        return list(self.model.tensors(lambda _: torch.bfloat16))

    def change(self) -> None:
        """Other weights, as after an update."""
        with torch.no_grad():
            for master in self.model.masters.values():
                master.mul_(1.0 + 1e-3 * (-1) ** self.number)
        self.model.refresh()

    async def publish(self) -> dict[str, float]:
        """Seconds of each part of one publication."""
        self.change()
        self.number += 1
        marks = [time.perf_counter()]
        publication = self.publisher.publish(self.number, self.model.tensors(lambda _: torch.bfloat16), incarnation=0)
        marks.append(time.perf_counter())
        await self.engine.pause()
        marks.append(time.perf_counter())
        await self.engine.update_weights(publication)
        marks.append(time.perf_counter())
        await self.engine.resume()
        marks.append(time.perf_counter())
        parts = dict(zip(("write_s", "pause_s", "load_s", "resume_s"), np.diff(marks).tolist(), strict=True))
        return {**parts, "publish_s": marks[-1] - marks[0]}

    async def floor(self) -> dict[str, float]:
        """Seconds of the copies and of vLLM's reload of the same weights."""
        start = time.perf_counter()
        np.copyto(self.buffers[1], self.buffers[0])
        np.copyto(self.buffers[2], self.buffers[1])
        copied = time.perf_counter()
        save_file(dict(self.tensors()), self.copy_of_model / "model.safetensors", metadata={"format": "pt"})
        llm = self.engine._llm  # noqa: SLF001 (no verb of ours reloads from a file)
        assert llm is not None
        await self.engine.pause()
        began = time.perf_counter()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.copy_of_model)})
        reloaded = time.perf_counter()
        await self.engine.resume()
        return {"copies_s": copied - start, "reload_s": reloaded - began}


async def measure(folder: Path, model_path: Path) -> dict[str, Any]:
    """All figures of one engine's life."""
    bench = Bench(folder, model_path)
    try:
        await bench.engine.start()
        for _ in range(NUM_WARM):
            await bench.publish()
            await bench.floor()
        before = tree_pss_bytes(os.getpid())
        runs = [{**await bench.publish(), **await bench.floor()} for _ in range(NUM_MEASURED)]
        for _ in range(NUM_MORE):
            await bench.publish()
        after = tree_pss_bytes(os.getpid())
    finally:
        await bench.engine.close()
        bench.publisher.close()
    ratio = statistics.median(run["publish_s"] / (run["copies_s"] + run["reload_s"]) for run in runs)
    grown = after - before
    return {
        "ratio_to_copy": ratio,
        **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "bytes": bench.buffers[0].nbytes,
        "grown_bytes": grown,
        "holds": {"ratio_to_copy": ratio <= 2, "memory_flat": grown < 0.02 * before},
    }


def main() -> None:
    """Measure and judge the claim."""
    torch.set_num_threads(2)
    model_path = resolve_model(quickstart().model.name, cache_dir=process_settings().cache_dir)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="fourstroke-bench-") as folder:
        report(CLAIM, asyncio.run(measure(Path(folder), model_path)), into="publish")


if __name__ == "__main__":
    main()
