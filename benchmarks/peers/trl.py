"""TRL's side of the comparisons: its trainers as a user calls them, without checkpoints and logs.

The tuned base has no gradient checkpointing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.peers.compare import OPTIONS
from benchmarks.peers.record import Record
from benchmarks.peers.work import EOS, SUPERVISED, Work, parity, text_of


def _settings(work: Work, microbatch: int, option: str) -> dict[str, Any]:
    rows = work.num_prompts * (1 if work.task in SUPERVISED else work.group_size)
    return {
        "use_cpu": work.device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_steps": work.steps,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": min(microbatch, rows),
        "gradient_accumulation_steps": max(1, rows // microbatch),
        "bf16": work.dtype == "bfloat16",
        "gradient_checkpointing": option == "checkpointing",
        **OPTIONS.get(work.task, {}).get(option, {}),
    }


def _train(work: Work, record: Record, option: str, make: Callable[[str], Any]) -> None:
    """Make a trainer, record the rows of each micro-batch, and train."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder)
        compute = trainer.compute_loss

        def seen(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            for ids, trained, value in _rows(inputs):
                record.see(ids, trained=trained, value=value)
            return compute(model, inputs, *args, **kwargs)

        trainer.compute_loss = seen
        if option == "padding-free" and not trainer.padding_free:
            raise RuntimeError(f"{type(trainer).__name__} switches padding_free off")
        record.watch(trainer.model)
        record.start()
        trainer.train()
        print(record.report())


def _rows(inputs: Any) -> Iterator[tuple[list[int], int, float]]:
    """Yield token ids, trained tokens, and advantage or side of each row of a micro-batch."""
    if "completion_ids" in inputs:  # of GRPO
        columns = [inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
        for prompt, seen, completion, made, advantage in zip(*columns, inputs["advantages"].tolist(), strict=True):
            yield prompt[seen.bool()].tolist() + completion[made.bool()].tolist(), int(made.sum()), advantage
    elif "position_ids" in inputs:  # rows of SFT, concatenated
        starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], inputs["input_ids"].shape[1]], strict=True):
            yield inputs["input_ids"][0, start:end].tolist(), int((inputs["labels"][0, start:end] >= 0).sum()), 1.0
    else:
        count = len(inputs["input_ids"])
        trained = inputs["labels"] >= 0 if "labels" in inputs else inputs.get("completion_mask", torch.zeros(count, 1))
        sides = [1.0] * count if "labels" in inputs else [1.0] * (count // 2) + [-1.0] * (count // 2)
        mask = inputs["attention_mask"].bool()
        for ids, kept, marks, side in zip(inputs["input_ids"], mask, trained, sides, strict=True):
            yield ids[kept].tolist(), int(marks.sum()), side


class _Forced(LogitsProcessor):
    """Processor that leaves each row of ``generate`` its given token."""

    def __init__(self, wanted: torch.Tensor, prompt_width: int) -> None:
        self._wanted, self._width = wanted, prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_(1, self._wanted[:, input_ids.shape[1] - self._width, None], 1e9)


def grpo(work: Work, record: Record, microbatch: int, option: str, rollouts: Callable[..., Any] | None = None) -> None:
    """Sample and train; ``generate`` gives the given completions, row by row."""
    model = work.make_model()
    generate, completions = model.generate, [ids for _, group in work.groups for ids in group]
    wanted = torch.full((len(completions), work.max_new_tokens), EOS)
    for row, ids in zip(wanted, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids)

    def forced(**inputs: Any) -> Any:
        processor = _Forced(wanted, inputs["input_ids"].shape[1])
        with record.part("generation"):
            return generate(**inputs, logits_processor=LogitsProcessorList([processor]))

    model.generate = forced

    def make(folder: str) -> GRPOTrainer:
        config = GRPOConfig(
            output_dir=folder,
            num_generations=work.group_size,
            max_completion_length=work.max_new_tokens,
            temperature=1.0,
            beta=0.0,
            shuffle_dataset=False,
            **_settings(work, microbatch, option),
        )
        return GRPOTrainer(
            model=model,
            reward_funcs=parity,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text_of(ids)} for ids, _ in work.groups]),
            processing_class=work.make_tokenizer(),
            rollout_func=rollouts,
        )

    _train(work, record, option, make)


def update(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train on given completions."""

    def rollouts(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        rows = [(list(prompt), list(ids)) for prompt, group in work.groups for ids in group]
        return {"prompt_ids": [row[0] for row in rows], "completion_ids": [row[1] for row in rows], "logprobs": None}

    grpo(work, record, microbatch, option, rollouts)


def _supervised(
    work: Work, record: Record, microbatch: int, option: str, kinds: tuple[Any, Any], rows: list[Any], **others: Any
) -> None:
    trainer, settings = kinds
    model = work.make_classifier() if work.task == "rm" else work.make_model()
    given = {"completion_only_loss": True} if work.task == "sft" else {}

    def make(folder: str) -> Any:
        config = settings(output_dir=folder, **given, **_settings(work, microbatch, option))
        dataset, tokenizer = Dataset.from_list(rows), work.make_tokenizer()
        return trainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer, **others)

    _train(work, record, option, make)


def sft(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train on the first completion of each prompt."""
    rows = [
        {"input_ids": [*prompt, *ids], "completion_mask": [0] * len(prompt) + [1] * len(ids)}
        for prompt, (ids, *_) in work.groups
    ]
    _supervised(work, record, microbatch, option, (SFTTrainer, SFTConfig), rows)


def rm(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train a reward model on pairs."""
    rows = [
        {"chosen_ids": [*prompt, *chosen], "rejected_ids": [*prompt, *rejected]}
        for prompt, (chosen, rejected) in work.groups
    ]
    _supervised(work, record, microbatch, option, (RewardTrainer, RewardConfig), rows)


def dpo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train the policy on pairs."""
    rows = [
        {"prompt": text_of(prompt), "chosen": f" {text_of(chosen)}", "rejected": f" {text_of(rejected)}"}
        for prompt, (chosen, rejected) in work.groups
    ]
    precompute = DPOTrainer._precompute_ref_logps

    def timed(*args: Any) -> Any:
        record.start()  # TRL does this work in its constructor, rlcore in its first step
        return precompute(*args)

    reference = None if option == "precomputed reference" else work.make_model()
    with patch.object(DPOTrainer, "_precompute_ref_logps", timed):
        _supervised(work, record, microbatch, option, (DPOTrainer, DPOConfig), rows, ref_model=reference)
