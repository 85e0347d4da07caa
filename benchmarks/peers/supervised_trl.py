"""TRL's trainers on the supervised work: ``python -m benchmarks.peers.supervised_trl rm|sft|sft-packed``.

Tuned: float32, no gradient checkpointing, no logging, the fastest of the sizes of a micro-batch that were tried.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.peers import supervised, work
from benchmarks.peers.arena import Meter, peak_mib

ROWS_PER_MICROBATCH = {"rm": 8, "sft": 4}
PACKED_LENGTH = 256
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "learning_rate": supervised.LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": supervised.NUM_STEPS,
}


def watched(trainer: Any, losses: list[float]) -> Any:
    """The trainer, which notes the loss of each micro-batch on its way."""
    compute: Callable[..., torch.Tensor] = trainer.compute_loss

    def noting(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss

    trainer.compute_loss = noting
    return trainer


def reward_trainer(folder: str) -> tuple[RewardTrainer, int, float]:
    """The trainer, its micro-batches a step, and what a micro-batch's loss counts in the step's."""
    size = ROWS_PER_MICROBATCH["rm"]
    count = supervised.NUM_EXAMPLES // size
    rows = [
        {"chosen_ids": [*prompt, *chosen], "rejected_ids": [*prompt, *rejected]}
        for prompt, chosen, rejected in supervised.examples()
    ]
    trainer = RewardTrainer(
        model=supervised.make_classifier(),
        args=RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=count,
            **QUIET,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=work.make_tokenizer("tiny"),
    )
    return trainer, count, 1 / count


def sft_trainer(folder: str, *, packing: bool) -> tuple[SFTTrainer, int, float]:
    """The same for completion-only SFT; a packed micro-batch is one row of PACKED_LENGTH tokens."""
    rows = [
        {"input_ids": [*prompt, *chosen], "completion_mask": [0] * len(prompt) + [1] * len(chosen)}
        for prompt, chosen, _ in supervised.examples()
    ]
    size = 1 if packing else ROWS_PER_MICROBATCH["sft"]
    trainer = SFTTrainer(
        model=work.make_model("tiny"),
        args=SFTConfig(
            output_dir=folder,
            completion_only_loss=True,
            packing=packing,
            max_length=PACKED_LENGTH,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=supervised.NUM_EXAMPLES // size,  # an epoch ends a step
            **QUIET,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=work.make_tokenizer("tiny"),
    )
    return trainer, len(trainer.get_train_dataloader()), 1.0


def main(stage: str) -> None:
    bare, losses = peak_mib(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        made = reward_trainer(folder) if stage == "rm" else sft_trainer(folder, packing=stage == "sft-packed")
        trainer, count, share = watched(made[0], losses), *made[1:]
        meter = Meter(bare_mib=bare)
        trainer.train()
        steps = [share * sum(losses[start : start + count]) for start in range(0, len(losses), count)]
        meter.report("trl packed" if stage == "sft-packed" else "trl", losses=steps)


if __name__ == "__main__":
    main(sys.argv[1])
