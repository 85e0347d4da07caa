"""Plain forward passes of single sequences, with the library's own logits: no packing, no chunk, no fused head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.distributed.sharded import device_of, run_forward
from rlcore.hardware.precision import at_least_float32, autocast
from rlcore.models.architectures import supports_prompt_sharing
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, activate
from rlcore.text.packing import TokenSequence


def plain_logits(model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """The logits [n, V] that predict the completion's tokens at ``places``, by one forward pass of the library's."""
    base = model.base if isinstance(model, AdaptedModel) else model
    if isinstance(model, AdaptedModel):
        activate(base, model.name)
    tokens = torch.tensor([[*prompt_ids, *completion_ids]], device=device_of(base))
    rows = torch.tensor([len(prompt_ids) - 1 + place for place in places], device=device_of(base))

    def forward() -> Tensor:
        with autocast(model):
            if supports_prompt_sharing(base):
                found: Tensor = base(tokens, use_cache=False, logits_to_keep=rows).logits[0]
            else:
                found = base(tokens, use_cache=False).logits[0, rows]
        return at_least_float32(found)

    return run_forward(model, forward)


def plain_logprobs(model: Any, sequence: TokenSequence, places: Sequence[int], temperature: float) -> Tensor:
    """The log-probabilities [n, V] of the whole vocabulary before the completion's tokens at ``places``."""
    logits = plain_logits(model, sequence.prompt_ids, sequence.completion_ids, places)
    return (logits / temperature).log_softmax(-1)


def picked(logprobs: Tensor, sequence: TokenSequence, places: Sequence[int]) -> Tensor:
    """Of log-probabilities [n, V] those of the completion's tokens at ``places``, [n]."""
    targets = torch.tensor([sequence.completion_ids[place] for place in places], device=logprobs.device)
    return logprobs.gather(-1, targets[:, None])[:, 0]


def plain_values(critic: ScalarHeadModel, sequence: TokenSequence, places: Sequence[int]) -> Tensor:
    """The critic's value [n] before the tokens at ``places``: its trunk on one sequence, and its head.

    The place behind the last token has the value beyond the end.
    """
    trunk: Any = critic.backbone
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]], device=device_of(trunk))
    rows = [len(sequence.prompt_ids) - 1 + place for place in places]

    def forward() -> Tensor:
        with autocast(trunk):
            states = trunk.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, rows]
        return critic.state_values(states)

    return run_forward(critic, forward)


@torch.no_grad()
def plain_scores(model: ScalarHeadModel, sequence: TokenSequence) -> float:
    """A reward model's score of one completion, read at the last token of a plain forward pass."""
    trunk: Any = model.backbone
    if isinstance(trunk, AdaptedModel):
        activate(trunk.base, trunk.name)
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]], device=device_of(trunk))
    with autocast(trunk):
        states = trunk.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, -1:]
    return float(model.state_values(states))
