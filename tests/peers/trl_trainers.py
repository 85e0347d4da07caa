"""TRL's trainers on a tiny random model: what their public ``compute_loss`` and ``train`` do with given completions."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlcore.models.scratch import make_tokenizer
from rlcore.text.packing import TokenSequence
from tests import strategies

TOKENIZER = make_tokenizer(max_positions=128)  # its EOS is its padding, as in every ChatML model
EOS = TOKENIZER.eos_token_id
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama over the tokenizer's vocabulary, float32."""
    return strategies.tiny_llama(seed, vocab_size=len(TOKENIZER))


class Recorder(GRPOTrainer):
    """Keeps what reaches the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Mapping[str, torch.Tensor]] = []

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(dict(inputs))
        return super().compute_loss(model, inputs, **kwargs)


def make_trainer(
    model: LlamaForCausalLM,
    rewards: Sequence[float | None],
    completions: Sequence[Sequence[int]],
    **settings: Any,
) -> Recorder:
    """A trainer whose rollouts of the one prompt are these completions, with these rewards, in one group."""
    count = len(completions)
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": count,
        "num_generations": count,
        "max_completion_length": 64,
        "max_steps": 1,
        "max_grad_norm": 1e9,
        "gradient_checkpointing": False,
        "temperature": 1.0,
        "beta": 0.0,
    }

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[5, 6, 7]] * count,
            "completion_ids": [list(completion) for completion in completions],
            "logprobs": [[-1.0] * len(completion) for completion in completions],
        }

    with tempfile.TemporaryDirectory() as folder:
        return Recorder(
            model=model,
            reward_funcs=lambda prompts, **_: list(rewards),
            args=GRPOConfig(output_dir=folder, **(QUIET | fixed | settings)),
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
            processing_class=copy.deepcopy(TOKENIZER),
            rollout_func=rollout,
        )


def padded_inputs(sequences: Sequence[TokenSequence], **columns: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of the GRPO trainer's ``compute_loss``: prompts padded left, the rest padded right."""
    prompts = [torch.tensor(sequence.prompt_ids) for sequence in sequences]
    completions = [torch.tensor(sequence.completion_ids) for sequence in sequences]

    def pad(rows: Sequence[torch.Tensor], value: float, side: str = "right") -> torch.Tensor:
        return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)

    mask = pad([torch.ones(len(row), dtype=torch.int64) for row in completions], 0)
    return {
        "prompt_ids": pad(prompts, EOS, "left"),
        "prompt_mask": pad([torch.ones(len(row), dtype=torch.int64) for row in prompts], 0, "left"),
        "completion_ids": pad(completions, EOS),
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        **{name: pad(rows, 0.0) for name, rows in columns.items()},
    }
