"""Plain forward passes of single sequences with the library's logits: no packing, no chunks, no fused head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.hardware.precision import at_least_float32, autocast, compute_dtype, set_compute_dtype
from rlcore.hardware.sharded import device_of, run_forward
from rlcore.models.architectures import supports_prompt_sharing
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, activate
from rlcore.text.packing import TokenSequence
from rlcore.training.learner import Learner


def plain_logits(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Return the logits [n, V] of the completion's tokens at ``positions``, by the model library's forward pass."""
    base = model.base if isinstance(model, AdaptedModel) else model
    if isinstance(model, AdaptedModel):
        activate(base, model.name)
    tokens = torch.tensor([[*prompt_ids, *completion_ids]], device=device_of(base))
    rows = torch.tensor([len(prompt_ids) - 1 + position for position in positions], device=device_of(base))

    def forward() -> Tensor:
        with autocast(model):
            if supports_prompt_sharing(base):
                found: Tensor = base(tokens, use_cache=False, logits_to_keep=rows).logits[0]
            else:
                found = base(tokens, use_cache=False).logits[0, rows]
        return at_least_float32(found)

    return run_forward(model, forward)


def plain_logprobs(model: Any, sequence: TokenSequence, positions: Sequence[int], temperature: float) -> Tensor:
    """Return the log-probabilities [n, V] of all tokens at ``positions`` of the completion."""
    logits = plain_logits(model, sequence.prompt_ids, sequence.completion_ids, positions)
    return (logits / temperature).log_softmax(-1)


def picked(logprobs: Tensor, sequence: TokenSequence, positions: Sequence[int]) -> Tensor:
    """Select the log-probabilities [n] of the completion's tokens from [n, V]."""
    targets = torch.tensor([sequence.completion_ids[position] for position in positions], device=logprobs.device)
    return logprobs.gather(-1, targets[:, None])[:, 0]


def plain_values(critic: ScalarHeadModel, sequence: TokenSequence, positions: Sequence[int]) -> Tensor:
    """Return the critic's values [n] before the tokens at ``positions``.

    The position after the last token has the value beyond the end.
    """
    return run_forward(critic, partial(_values, critic, sequence, positions))


@torch.no_grad()
def plain_scores(model: ScalarHeadModel, sequence: TokenSequence) -> float:
    """Return a reward model's score of one completion, read at the last token."""
    return float(_values(model, sequence, [len(sequence.completion_ids)]))


def _values(model: ScalarHeadModel, sequence: TokenSequence, positions: Sequence[int]) -> Tensor:
    backbone: Any = model.backbone
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]], device=device_of(backbone))
    rows = [len(sequence.prompt_ids) - 1 + position for position in positions]
    with autocast(backbone):
        states = backbone.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, rows]
    return model.state_values(states)


@contextmanager
def in_float32(learner: Learner) -> Iterator[None]:
    """Within the context, the products of models with float32 weights alone are float32."""
    models = [(model, compute_dtype(model)) for model in backbones(learner)]
    try:
        for model, dtype in models:
            is_narrow = any(weight.dtype.itemsize < 4 for weight in model.parameters())
            set_compute_dtype(model, dtype if is_narrow else model.dtype)
        yield
    finally:
        for model, dtype in models:
            set_compute_dtype(model, dtype)


def backbones(learner: Learner) -> list[Any]:
    """Return the modules that compute: the policy's, and the critic's if there is one."""
    models = [learner.policy, *([learner.critic.backbone] if learner.critic is not None else [])]
    return [getattr(model, "base", model) for model in models]
