"""One step of TRL's GRPO trainer: tuned (float32, no checkpointing, larger micro-batches) or with its defaults."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers import work
from benchmarks.peers.forced import ForcedLengths

SETTINGS: dict[str, dict[str, Any]] = {
    # A CPU without bfloat16 units is several times slower in it, and memory is sufficient.
    "trl-tuned": {
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    },
    "trl-defaults": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
}


def forced(generate: Callable[..., torch.Tensor], clock: list[work.Clock]) -> Callable[..., torch.Tensor]:
    """Return ``generate`` of a model with forced lengths, timed as generation by the clock."""

    def forced_generate(**inputs: Any) -> torch.Tensor:
        processor = ForcedLengths(inputs["input_ids"].shape[1], work.completion_lengths())
        with clock[0].generation():
            return generate(**inputs, logits_processor=LogitsProcessorList([processor]))

    return forced_generate


def rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return 0 and 1 alternating; reject completions without the forced lengths."""
    assert [len(ids) for ids in completion_ids] == work.completion_lengths().tolist()
    return [float(number % 2) for number in range(len(prompts))]


def main(arm: str, name: str) -> None:
    model, clock = work.make_model(name), []
    model.generate = forced(model.generate, clock)
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in work.prompts()]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            max_steps=1,
            num_generations=work.GROUP_SIZE,
            max_completion_length=work.MAX_NEW_TOKENS,
            learning_rate=work.LEARNING_RATE,
            temperature=1.0,
            beta=0.0,
            shuffle_dataset=False,
            **SETTINGS[arm],
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=work.make_tokenizer(work.MODELS[name]["vocab_size"]),
        )
        clock.append(work.Clock())
        trainer.train()
        clock[0].report(arm, int(work.completion_lengths().sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])
