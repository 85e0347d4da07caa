"""TRL's PPO, which 1.12 was the last release to have: ``python -m benchmarks peers ppo`` runs under that one.

Its trainer has autocast in updates alone, and steps after every micro-batch if the rows are one batch. It is tuned to
have autocast in all passes, and to step once a batch, as its ``num_mini_batches = 1`` says.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import convert_outputs_to_fp32
from datasets import Dataset
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.peers.record import Record
from benchmarks.peers.trl import settings
from benchmarks.peers.work import EOS, KL, PAD, VALUE_LOSS, Work


def ppo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train with four models."""
    is_half = work.dtype == "bfloat16"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if is_half else "no"
    tokenizer, judge = work.make_tokenizer(), work.make_classifier().requires_grad_(False)
    tokenizer.padding_side = "left"
    data = Dataset.from_list([{"input_ids": list(prompt)} for prompt, group in work.groups for _ in group])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = PPOConfig(
            response_length=work.max_new_tokens,
            stop_token="eos",
            temperature=1.0,
            total_episodes=work.rows * work.steps,
            num_ppo_epochs=1,
            num_sample_generations=0,
            kl_coef=KL,
            lam=1.0,
            vf_coef=VALUE_LOSS,
            **settings(work, folder, microbatch, option),
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=work.make_model(),
            ref_model=None,
            reward_model=judge,
            value_model=work.make_classifier(),
            train_dataset=data,
            eval_dataset=data,
        )
        trainer.accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        models = trainer.accelerator.unwrap_model(trainer.model)
        for model in (models.policy, models.value_model, trainer.ref_model, judge):
            record.watch(model)
        record.follow(models.policy)
        trainer.ref_model = trainer.accelerator.prepare_model(trainer.ref_model, evaluation_mode=True)
        for name, function in _functions(work, record, torch.autocast("cpu", torch.bfloat16, enabled=is_half)).items():
            stack.enter_context(patch.object(ppo_trainer, name, function))
        record.start()
        trainer.train()
        print(record.report())


ppo_shared = ppo  # TRL's critic is always a model of its own


def _functions(work: Work, record: Record, autocast: torch.autocast) -> dict[str, Any]:
    """Return stand-ins for functions of TRL's module: given tokens, all passes in the work's precision, what is seen.

    Means of losses are over the batch instead of the micro-batch, and the standard deviation is that of a population,
    as rlcore's, so that gradients compare.
    """
    given, batch = {prompt: cycle(group) for prompt, group in work.groups}, list[torch.Tensor]()
    num_tokens, multinomial = int(work.completion_lengths.sum()), torch.multinomial
    generate, batch_generation, whiten = (
        getattr(ppo_trainer, name) for name in ("generate", "batch_generation", "masked_whiten")
    )

    def generated(model: Any, queries: torch.Tensor, *others: Any) -> Any:
        wanted = torch.full((work.max_new_tokens, len(queries)), EOS)
        for column, query in enumerate(queries):
            ids = next(given[tuple(query[query != PAD].tolist())])
            wanted[: len(ids), column] = torch.tensor(ids)
        steps = iter(wanted)

        def draw(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
            multinomial(probabilities, num_samples)
            return next(steps)[:, None]

        with patch.object(torch, "multinomial", draw):
            return generate(model, queries, *others)

    def generated_batch(*arguments: Any) -> Any:
        with record.part("generation"), autocast:
            made = batch_generation(*arguments)
        batch[:] = made[0]
        return made

    def mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum() * work.rows / (num_tokens * len(values))

    def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = whiten(values, mask) * (num_tokens / (num_tokens - 1)) ** 0.5
        for ids, own, row in zip(batch, mask, found, strict=True):
            record.see(ids[ids != PAD].tolist(), trained=int(own.sum()), value=float(row[own].mean()))
        return found

    return {
        "generate": generated,
        "batch_generation": generated_batch,
        "get_reward": convert_outputs_to_fp32(autocast(ppo_trainer.get_reward)),
        "masked_mean": mean,
        "masked_whiten": whitened,
    }
