"""One PPO iteration of TRL 0.29, with its PPO trainer: ``python -m benchmarks.peers.ppo_trl full|lora tiny|smollm2``.

``full``: policy, reference, critic and reward model are four models, as its trainer has it; ``lora``: the policy is an
adapter of rank 8 and the reference is its base, critic and reward model are models.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LogitsProcessorList
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peers import ppo_work, work
from benchmarks.peers.arena import Meter, peak_mib
from benchmarks.peers.forced import ForcedLengths
from benchmarks.peers.scalar import make_scalar_model

NAMES = {"full": "TRL 0.29, full", "lora": "TRL 0.29, LoRA"}


def lengths_of(rows: torch.Tensor, task: ppo_work.Work) -> torch.Tensor:
    """The trainer shuffles: the lengths of its rows, each prompt's in the order of the work, int64 [S]."""
    left: dict[tuple[int, ...], Iterator[int]] = {
        prompt: iter(task.lengths[start : start + task.group_size].tolist())
        for prompt, start in zip(task.prompts, range(0, len(task.lengths), task.group_size), strict=True)
    }
    widest = max(map(len, task.prompts))
    prompts = [tuple(row[-widest:][row[-widest:] != 0].tolist()) for row in rows]
    return torch.tensor([next(left[prompt]) for prompt in prompts])


def forced(generate: Callable[..., Any], task: ppo_work.Work, meters: list[Meter]) -> Callable[..., Any]:
    """``generate`` of a model with forced lengths, counted as generation; refuses others than those of the work."""

    def forced_generate(*args: Any, **inputs: Any) -> Any:
        width = inputs["input_ids"].shape[1]
        # The trainer masks padding and writes 0 there, which is the padding.
        lengths = lengths_of(inputs["input_ids"], task)
        start = time.process_time()
        output = generate(*args, **inputs, logits_processor=LogitsProcessorList([ForcedLengths(width, lengths)]))
        meters[0].add("generation", time.process_time() - start)
        assert ((output.sequences[:, width:] == work.EOS).int().argmax(-1) + 1).equal(lengths)
        return output

    return forced_generate


def make_trainer(kind: str, task: ppo_work.Work, size: str, folder: str) -> PPOTrainer:
    """Tuned: float32, no gradient checkpointing, micro-batches of ``rows_per_microbatch``."""
    policy = work.make_model(size)
    rows, count = len(task.lengths), task.rows_per_microbatch
    config = PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=ppo_work.LEARNING_RATE,
        total_episodes=rows,
        per_device_train_batch_size=count,
        gradient_accumulation_steps=rows // count,
        num_ppo_epochs=ppo_work.NUM_EPOCHS,
        num_sample_generations=0,
        response_length=int(task.lengths.max()),
        stop_token="eos",
        temperature=1.0,
        kl_coef=ppo_work.KL,
    )
    dataset = Dataset.from_list([{"input_ids": list(prompt)} for prompt in task.repeated])
    tokenizer = work.make_tokenizer("tiny")
    tokenizer.padding_side = "left"
    lora = LoraConfig(r=ppo_work.RANK, lora_alpha=2 * ppo_work.RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=make_scalar_model(policy, seed=2).requires_grad_(False),
        value_model=make_scalar_model(policy, seed=3),
        train_dataset=dataset,
        eval_dataset=dataset,
        peft_config=lora if kind == "lora" else None,
    )


def main(kind: str, size: str) -> None:
    bare, meters = peak_mib(), list[Meter]()
    task = ppo_work.make_work(size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, task, size, folder)
        policy = trainer.accelerator.unwrap_model(trainer.model).policy
        policy.generate = forced(policy.generate, task, meters)
        meters.append(Meter(bare_mib=bare))
        trainer.train()
        parameters = sum(parameter.numel() for parameter in work.make_model(size).parameters())
        meters[0].report(NAMES[kind], completion_tokens=int(task.lengths.sum()), num_parameters=parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
