"""Token weights of the loss.

Weights are computed once for the whole optimizer step, and the loss is a plain weighted sum. Packing, micro-batches and
data parallelism therefore cannot change it. An episode counts once, however many samples it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

#: (padded loss_mask of all samples of the step, bool [S, T]; number of each sample's episode, int64 [S]) -> weights
#: [S, T] in torch's default dtype
WeightingFn = Callable[[Tensor, Tensor], Tensor]


def token_mean(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight all tokens equally: ``1 / (number of tokens of the step)`` (DAPO, Yu et al. 2025, eq. 8)."""
    mask = loss_mask.to(torch.get_default_dtype())
    return mask / mask.sum().clamp(min=1.0)


def sequence_mean(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight all episodes equally: ``1 / (E * tokens of the episode)`` (GRPO, Shao et al. 2024, eq. 3).

    E is the number of episodes with at least one trained token.
    """
    mask = loss_mask.to(torch.get_default_dtype())
    lengths, num_episodes = _episodes(mask, episode)
    return mask / lengths.clamp(min=1.0) / num_episodes


def sequence_sum(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"]
) -> Float[Tensor, "samples time"]:
    """Weight every token ``1 / E``, which sums log-probabilities per episode (RLOO, Ahmadian et al. 2024)."""
    return constant(loss_mask, episode, constant_length=1)


def constant(
    loss_mask: Bool[Tensor, "samples time"], episode: Int[Tensor, "samples"], *, constant_length: int
) -> Float[Tensor, "samples time"]:
    """Weight every token ``1 / (E * constant_length)``: no bias to long episodes (Dr. GRPO, Liu et al. 2025)."""
    mask = loss_mask.to(torch.get_default_dtype())
    _, num_episodes = _episodes(mask, episode)
    return mask / (num_episodes * float(constant_length))


def _episodes(mask: Tensor, episode: Tensor) -> tuple[Tensor, Tensor]:
    places = {number: place for place, number in enumerate(dict.fromkeys(episode.tolist()))}
    index = torch.tensor([places[number] for number in episode.tolist()], device=mask.device)
    lengths = mask.new_zeros(len(places)).index_add(0, index, mask.sum(1))
    return lengths[index][:, None], (lengths > 0).sum().clamp(min=1)


#: Weightings by configuration name; ``constant`` needs its ``constant_length`` bound first.
WEIGHTINGS: Mapping[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}
