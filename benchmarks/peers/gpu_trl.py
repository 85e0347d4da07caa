"""Updates of TRL's GRPO trainer: ``python -m benchmarks.peers.gpu_trl TRL|"TRL, recompute" SHAPE CONTEXT DEVICE``.

The completions come from a ``rollout_func``, so that a step is the update only. A micro-batch has as many rows as
rlcore's.
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.gpu_work import GROUP_SIZE, LEARNING_RATE, NUM_STEPS, TOKENS_PER_MICROBATCH, StepClock, Work, main
from benchmarks.peers.work import make_tokenizer


class MarkSteps(TrainerCallback):
    """Callback that reports the end of each step to the clock."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.mark()


def rewards(prompts: list[str], **_: Any) -> list[float]:
    """Return 0 and 1 alternating, so that the group has a signal."""
    return [float(number % 2) for number in range(len(prompts))]


def run(arm: str, work: Work) -> None:
    """Run the steps of one arm."""

    def rollouts(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        completions = [list(completion) for completion in work.completions]
        assert len(prompts) == len(completions)
        return {"prompt_ids": [list(work.prompt_ids)] * len(prompts), "completion_ids": completions, "logprobs": None}

    rows = min(GROUP_SIZE, max(1, TOKENS_PER_MICROBATCH // work.context))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=work.device == "cpu",
            bf16=work.device == "cuda",
            gradient_checkpointing=arm == "TRL, recompute",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=GROUP_SIZE // rows,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            max_steps=NUM_STEPS,
            num_generations=GROUP_SIZE,
            max_completion_length=max(work.lengths),
            learning_rate=LEARNING_RATE,
            beta=0.0,
        )
        trainer = GRPOTrainer(
            model=work.make_model(),
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "t5"}] * NUM_STEPS),
            processing_class=make_tokenizer(work.vocabulary),
            rollout_func=rollouts,
        )
        clock = StepClock(work)
        trainer.add_callback(MarkSteps(clock))
        trainer.train()
        clock.report(arm)


if __name__ == "__main__":
    main(run)
