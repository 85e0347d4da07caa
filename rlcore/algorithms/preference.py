"""Preference loss for reward-model scores and for the implicit rewards of a policy (DPO)."""

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
    """Return ``-p·logsigmoid(d - m) - (1 - p)·logsigmoid(-d - m)``, summed with ``weights`` over [P] pairs.

    d = r_chosen - r_rejected, m is the margin, and p the probability that the chosen side is better. At p = 1 this is
    the loss of Bradley & Terry (1952) with a margin (Touvron et al. 2023, eq. 2). Below, it is the expected loss over
    the label, whose sides are swapped with probability 1 - p. Weights are normalized over the optimizer step. The
    K(K-1)/2 pairs of a ranked list share one weight, so each list counts once (Ouyang et al. 2022, eq. 1).
    """
    difference = chosen_scores - rejected_scores
    as_labelled = F.logsigmoid(difference - margins)
    swapped = F.logsigmoid(-difference - margins)
    return -(weights * (probabilities * as_labelled + (1.0 - probabilities) * swapped)).sum()


def implicit_rewards(
    policy_logprobs: Float[Tensor, "completions"], ref_logprobs: Float[Tensor, "completions"], *, beta: float
) -> Float[Tensor, "completions"]:
    """Return ``beta (ln π(y|x) - ln π_ref(y|x))`` of whole completions [S] (Rafailov et al. 2023, eq. 5).

    The policy is optimal for this reward at a KL penalty of ``beta``; a term that depends on x alone is omitted.
    :func:`bradley_terry` of it is the DPO loss (eq. 7), and with :func:`smoothed` labels the conservative DPO loss.
    """
    return beta * (policy_logprobs - ref_logprobs)


def smoothed(probabilities: Float[Tensor, "pairs"], smoothing: float) -> Float[Tensor, "pairs"]:
    """Return probabilities [P] if a fraction ``smoothing`` of labels is wrong at random: ``p (1 - s) + (1 - p) s``."""
    return probabilities * (1.0 - smoothing) + (1.0 - probabilities) * smoothing
