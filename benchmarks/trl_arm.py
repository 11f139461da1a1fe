"""The peer of ``vs_trl.py``: TRL's GRPOTrainer on recorded work, one step at each line that it is sent.

Runs in TRL's own environment and imports nothing of ours. Argument: a JSON file with ``model``, ``work`` (the recorded
work), ``num_new_tokens``, ``num_steps``, ``output`` and ``settings`` (of ``GRPOConfig``, and ``dtype`` of the weights).
Prints a JSON object after start, and one after each step.
"""

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# What the trainer prints must not mix with what we say.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def say(**values: Any) -> None:
    """One line to the driver."""
    ANSWERS.write(json.dumps(values) + "\n")


class Gate(TrainerCallback):
    """Waits for the driver before a step, and tells it how long the step took."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Everything is loaded."""
        say(ready=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before sampling."""
        sys.stdin.readline()
        self.started = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimiser's step."""
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        say(seconds=time.monotonic() - self.started, peak_bytes=peak_bytes)


def main() -> None:
    """Train for as many steps as asked."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    work = json.loads(Path(spec["work"]).read_text())
    settings = dict(spec["settings"])
    dtype = settings.pop("dtype")
    torch.set_num_threads(os.cpu_count() or 1)
    num_members, num_rows = len(work["scores"][0][0]), len(work["prompts"]) * len(work["scores"][0][0])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "system", "content": work["system"]}, {"role": "user", "content": prompt}],
                "task": index,
            }
            for index, prompt in enumerate(work["prompts"])
        ]
    )
    lengths: list[int] = []

    def score(completion_ids: list[list[int]], task: list[int], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        assert set(lengths) == {spec["num_new_tokens"]}, Counter(lengths)
        seen: Counter[int] = Counter()
        scores = []
        for index in task:
            scores.append(work["scores"][0][index][seen[index]])
            seen[index] += 1
        assert len(scores) == num_rows, len(scores)
        return scores

    config = GRPOConfig(
        output_dir=spec["output"],
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=10_000,
        max_steps=spec["num_steps"],
        num_train_epochs=10_000,
        num_generations=num_members,
        generation_batch_size=num_rows,
        gradient_accumulation_steps=num_rows // settings["per_device_train_batch_size"],
        max_completion_length=spec["num_new_tokens"],
        temperature=1.0,
        beta=0.0,
        scale_rewards="group",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": dtype},
        **{
            **settings,
            "generation_kwargs": {
                "min_new_tokens": spec["num_new_tokens"],
                **settings.get("generation_kwargs", {}),
            },
        },
    )
    GRPOTrainer(
        model=spec["model"],
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        reward_funcs=score,
        callbacks=[Gate()],
    ).train()


if __name__ == "__main__":
    main()
