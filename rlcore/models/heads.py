"""Language model with a scalar head: the critic (a value per token) or the reward model (a score per completion)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.errors import ModelError
from rlcore.hardware.precision import at_least_float32, no_autocast
from rlcore.hardware.sharded import device_of, gather_full, ranks_of
from rlcore.models.policy import completion_states, hidden_states, score_batches, score_tokens, state_scores
from rlcore.models.saving import HEAD_FILE, save_tensors
from rlcore.text.packing import PackedBatch, TokenSequence

if TYPE_CHECKING:
    from jaxtyping import Float


class ScalarHeadModel(nn.Module):
    """Backbone and a bias-free linear map from its hidden state to a scalar."""

    def __init__(self, backbone: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    @classmethod
    def on_backbone(cls, backbone: PreTrainedModel) -> ScalarHeadModel:
        """Return a critic on this backbone (not a copy) that predicts 0 everywhere."""
        head = _new_head(backbone)
        nn.init.zeros_(head.weight)
        return cls(backbone, head)

    @classmethod
    def with_random_head(cls, backbone: PreTrainedModel, generator: torch.Generator) -> ScalarHeadModel:
        """Return a reward model on this backbone, head from N(0, 1/sqrt(H+1)) (Stiennon et al. 2020, app. B.1)."""
        model = cls(backbone, _new_head(backbone))
        model.init_head(generator)
        return model

    @torch.no_grad()
    def init_head(self, generator: torch.Generator) -> None:
        weight = self.head.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * (self.head.in_features + 1) ** -0.5)

    def token_values(self, batch: PackedBatch) -> Float[Tensor, "tokens"]:
        """Return the value of the state before each completion token: float32 [N]."""
        return self._scalars(batch, batch.predictors)

    def sequence_scores(self, batch: PackedBatch) -> Float[Tensor, "sequences"]:
        """Return the score of each sequence at its last token: float32 [S], in the order of ``batch.sequences``."""
        return self._scalars(batch, batch.last_positions)

    def _scalars(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        return self.state_values(hidden_states(self.backbone, batch).flatten(0, 1)[positions])

    def state_values(self, states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens"]:
        """Apply the head to hidden states [N, H]: float32 [N] in any compute precision."""
        with no_autocast(states):
            return at_least_float32(self.head(states.to(self.head.weight.dtype)).squeeze(-1))

    def train_last_layers(self, count: int) -> None:
        """Freeze the backbone except its last ``count`` layers and final norm; -1 trains all.

        Raises:
            ModelError: The backbone has no list of layers followed by a norm.
        """
        layers, norm = (getattr(self.backbone.base_model, name, None) for name in ("layers", "norm"))
        if count < 0:
            return
        if count and (layers is None or norm is None):
            raise ModelError(
                f"{type(self.backbone).__name__} has no list of layers followed by a norm",
                fix="set reward_model.backbone.trainable_layers = -1",
            )
        self.backbone.requires_grad_(False)
        if layers is not None and norm is not None and count:
            layers[-count:].requires_grad_(True)
            norm.requires_grad_(True)


def _new_head(backbone: PreTrainedModel) -> nn.Linear:
    return nn.Linear(backbone.config.hidden_size, 1, bias=False, device=device_of(backbone), dtype=torch.float32)


def score_values(
    critic: ScalarHeadModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int
) -> list[Float[Tensor, "_time"]]:
    """Return the values of completions without gradient: one float32 [T] tensor on the CPU per sequence."""

    def score(batch: PackedBatch) -> tuple[Tensor]:
        return (critic.token_values(batch),)

    (values,) = score_tokens(critic, sequences, score, tokens_per_microbatch=tokens_per_microbatch)
    return values


def score_shared(
    critic: ScalarHeadModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int, temperature: float
) -> tuple[list[Float[Tensor, "_time"]], list[Float[Tensor, "_time"]]]:
    """Return log-probabilities and values of a policy with the critic's head, from one forward pass per batch.

    Both have one float32 [T] tensor on the CPU per sequence.
    """

    def score(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        states = completion_states(critic.backbone, batch)
        return state_scores(critic.backbone, states, batch, temperature=temperature), critic.state_values(states)

    logprobs, values = score_tokens(critic, sequences, score, tokens_per_microbatch=tokens_per_microbatch, count=2)
    return logprobs, values


def score_rewards(
    reward_model: ScalarHeadModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int
) -> Float[Tensor, "sequences"]:
    """Return raw (uncentered) scores without gradient: float32 [S] on the CPU, in the order of ``sequences``."""
    scores = torch.empty(len(sequences))

    def score(batch: PackedBatch) -> tuple[Tensor]:
        return (reward_model.sequence_scores(batch),)

    for batch, (found,) in score_batches(reward_model, sequences, score, tokens_per_microbatch=tokens_per_microbatch):
        scores[batch.sequences] = found
    return scores


def save_head(model: ScalarHeadModel, folder: Path) -> None:
    """Write the head's weight next to the backbone's checkpoint."""
    ranks, weight = ranks_of(model), gather_full(model.head.weight.detach()).cpu().contiguous()
    ranks.broadcast_object(partial(save_tensors, {"weight": weight}, folder / HEAD_FILE))


def load_scalar_model(backbone: PreTrainedModel, folder: Path) -> ScalarHeadModel:
    """Add the head in ``folder`` to a backbone that was loaded from there.

    Raises:
        ModelError: The head is missing, or has another width.
    """
    path = folder / HEAD_FILE
    if not path.is_file():
        raise ModelError("scalar head not found", where=str(path), fix="use the folder of a trained reward model")
    weight = load_file(path)["weight"]
    head = _new_head(backbone)
    if weight.shape != head.weight.shape:
        raise ModelError(
            f"head has shape {tuple(weight.shape)}, but the backbone needs {tuple(head.weight.shape)}", where=str(path)
        )
    with torch.no_grad():
        head.weight.copy_(weight)
    return ScalarHeadModel(backbone, head)
