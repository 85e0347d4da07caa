"""The loss on preferences, of a reward model's scores and of a policy's implicit rewards (DPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def bradley_terry(
    chosen_scores: Float[Tensor, "pairs"],
    rejected_scores: Float[Tensor, "pairs"],
    *,
    margins: Float[Tensor, "pairs"],
    probabilities: Float[Tensor, "pairs"],
    weights: Float[Tensor, "pairs"],
) -> Float[Tensor, ""]:
    """``-p·logsigmoid(d - m) - (1 - p)·logsigmoid(-d - m)`` summed with ``weights`` over [P] pairs; d = r_chosen -
    r_rejected, m the margin, p the probability that the chosen side is the better one.

    At p = 1 it is the loss of Bradley & Terry (1952) with a margin (Touvron et al. 2023, eq. 2); below, its expectation
    over the label: with probability 1 - p the sides are swapped. Weights are normalised over the whole optimizer step;
    the K(K-1)/2 pairs of a ranked list share one weight, so that each list counts once (Ouyang et al. 2022, eq. 1).
    """
    difference = chosen_scores - rejected_scores
    as_labelled = F.logsigmoid(difference - margins)
    swapped = F.logsigmoid(-difference - margins)
    return -(weights * (probabilities * as_labelled + (1.0 - probabilities) * swapped)).sum()


def implicit_rewards(
    policy_logprobs: Float[Tensor, "completions"], ref_logprobs: Float[Tensor, "completions"], *, beta: float
) -> Float[Tensor, "completions"]:
    """``beta (ln π(y|x) - ln π_ref(y|x))`` of whole completions [S]: the reward for which a policy would be the best
    one at a KL penalty of ``beta`` (Rafailov et al. 2023, eq. 5, without the term that all answers to x share).

    :func:`bradley_terry` of them is the loss of DPO (eq. 7), and with :func:`smoothed` labels that of conservative DPO.
    """
    return beta * (policy_logprobs - ref_logprobs)


def smoothed(probabilities: Float[Tensor, "pairs"], smoothing: float) -> Float[Tensor, "pairs"]:
    """Probabilities [P] when a label is wrong at random in a share ``smoothing``: ``p (1 - s) + (1 - p) s``."""
    return probabilities * (1.0 - smoothing) + (1.0 - probabilities) * smoothing
