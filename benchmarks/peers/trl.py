"""TRL's side of the comparisons: its trainers as a user calls them, without checkpoints and logs.

The tuned base is without gradient checkpointing, at the precision of the work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching import ContinuousBatchingManager
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.peers.options import OPTIONS
from benchmarks.peers.record import Record
from benchmarks.peers.work import EOS, Work, parity, text_of


def settings(work: Work, folder: str, microbatch: int, option: str) -> dict[str, Any]:
    """Return the settings of a trainer."""
    base = {
        "output_dir": folder,
        "use_cpu": work.device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_steps": work.steps,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": min(microbatch, work.rows),
        "gradient_accumulation_steps": max(1, work.rows // microbatch),
    }
    if option == "defaults":
        return base
    tuned = {"bf16": work.dtype == "bfloat16", "gradient_checkpointing": option == "checkpointing"}
    return base | tuned | OPTIONS.get(work.task, {}).get(option, {})


def _train(trainer: Any, record: Record, option: str) -> None:
    """Record the rows of each micro-batch, and train."""
    compute = trainer.compute_loss

    def seen(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for ids, trained, value in _rows(inputs):
            record.see(ids, trained=trained, value=value)
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = seen
    if option == "hub kernels":
        trainer.model.set_use_kernels(True)
    if option == "padding-free" and not trainer.padding_free:
        raise RuntimeError(f"{type(trainer).__name__} switches padding_free off")
    record.watch(trainer.model)
    record.start()
    trainer.train()
    print(record.report())


def _rows(inputs: Any) -> Iterator[tuple[list[int], int, float]]:
    """Yield token ids, number of trained tokens, and advantage or side of each row of a micro-batch."""
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
    """Processor that leaves each row of ``generate`` only its given token."""

    def __init__(self, wanted: torch.Tensor, prompt_width: int) -> None:
        self._wanted, self._width = wanted, prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_(1, self._wanted[:, input_ids.shape[1] - self._width, None], 1e9)


def _force(model: Any, work: Work, record: Record) -> None:
    """Make ``generate`` and continuous batching give the given completions, row by row."""
    generate, generate_batch, add_request = model.generate, model.generate_batch, ContinuousBatchingManager.add_request
    completions = [ids for _, group in work.groups for ids in group]
    wanted = torch.full((len(completions), work.max_new_tokens), EOS)
    for row, ids in zip(wanted, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids)

    def forced(**inputs: Any) -> Any:
        processor = _Forced(wanted, inputs["input_ids"].shape[1])
        with record.part("generation"):
            return generate(**inputs, logits_processor=LogitsProcessorList([processor]))

    def forced_batch(prompts: Sequence[Sequence[int]], **settings: Any) -> Any:
        left = {tuple(prompt): list(group) for prompt, group in work.groups}
        given: dict[str, tuple[int, ...]] = {}

        def add(manager: Any, input_ids: list[int], request_id: str, **others: Any) -> Any:
            given[request_id] = left[tuple(input_ids)].pop(0)
            others |= {"max_new_tokens": len(given[request_id]), "eos_token_id": -1}
            return add_request(manager, input_ids, request_id, **others)

        ContinuousBatchingManager.add_request = add
        with record.part("generation"):
            made = generate_batch(prompts, **settings)
        for name, output in made.items():  # another token costs the same
            assert len(output.generated_tokens) == len(given[name])
            output.generated_tokens = list(given[name])
        return made

    model.generate, model.generate_batch = forced, forced_batch


def _policy_trainer(
    work: Work, record: Record, microbatch: int, option: str, rollouts: Callable[..., Any] | None
) -> None:
    model = work.make_model()
    _force(model, work, record)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            num_generations=work.group_size,
            max_completion_length=work.max_new_tokens,
            temperature=1.0,
            beta=0.0,
            shuffle_dataset=False,
            **settings(work, folder, microbatch, option),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=parity,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text_of(ids)} for ids, _ in work.groups]),
            processing_class=work.make_tokenizer(),
            rollout_func=rollouts,
        )
        _train(trainer, record, option)


def grpo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Sample and train."""
    _policy_trainer(work, record, microbatch, option, None)


def update(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train on given completions."""

    def rollouts(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        rows = [(list(prompt), list(ids)) for prompt, group in work.groups for ids in group]
        return {"prompt_ids": [row[0] for row in rows], "completion_ids": [row[1] for row in rows], "logprobs": None}

    _policy_trainer(work, record, microbatch, option, rollouts)


def sft(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train on the first completion of each prompt."""
    rows = [
        {"input_ids": [*prompt, *ids], "completion_mask": [0] * len(prompt) + [1] * len(ids)}
        for prompt, (ids, *_) in work.groups
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=work.make_model(),
            args=SFTConfig(completion_only_loss=True, **settings(work, folder, microbatch, option)),
            train_dataset=Dataset.from_list(rows),
            processing_class=work.make_tokenizer(),
        )
        _train(trainer, record, option)


def rm(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train a reward model on pairs."""
    rows = [
        {"chosen_ids": [*prompt, *chosen], "rejected_ids": [*prompt, *rejected]}
        for prompt, (chosen, rejected) in work.groups
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=work.make_classifier(),
            args=RewardConfig(**settings(work, folder, microbatch, option)),
            train_dataset=Dataset.from_list(rows),
            processing_class=work.make_tokenizer(),
        )
        _train(trainer, record, option)


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

    with tempfile.TemporaryDirectory() as folder, patch.object(DPOTrainer, "_precompute_ref_logps", timed):
        trainer = DPOTrainer(
            model=work.make_model(),
            ref_model=None if option == "precomputed reference" else work.make_model(),
            args=DPOConfig(**settings(work, folder, microbatch, option)),
            train_dataset=Dataset.from_list(rows),
            processing_class=work.make_tokenizer(),
        )
        _train(trainer, record, option)
