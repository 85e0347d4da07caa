"""Table of algorithms: one row of pure functions each. A new algorithm is a row here and a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from rlcore.algorithms.advantages import (
    AdvantageFn,
    batch_normalized,
    gae,
    group_centered,
    group_normalized,
    group_over_mean,
    leave_one_out,
    per_token_reward,
)
from rlcore.algorithms.kl import PenaltyController
from rlcore.algorithms.ratios import RatioFn, completion_ratio, sequence_ratio, token_ratio
from rlcore.algorithms.surrogates import (
    Surrogate,
    SurrogateFn,
    cispo,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
    unclipped,
)
from rlcore.algorithms.weighting import WeightingFn, constant, sequence_mean, sequence_sum, token_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Four pure functions of the policy loss (:mod:`rlcore.algorithms.objective`).

    A run sets constants by the keyword names of these functions (:func:`rlcore.algorithms.resolve.resolve_algorithm`).
    With a critic, the advantages are whitened for the policy, and the raw ones define the critic's returns.

    With a ``penalty``, a token's loss has the term beta * KL(old || policy), and the learner adapts beta from its start
    in the row (Schulman et al. 2017, eq. 8). The paper's exact KL is replaced by its estimate k3 at the sampled token
    (:mod:`rlcore.algorithms.kl`).
    """

    advantage: AdvantageFn
    ratio: RatioFn
    surrogate: SurrogateFn
    weighting: WeightingFn
    uses_critic: bool = False
    penalty: PenaltyController | None = None


def _clip(low: float, high: float, surrogate: Callable[..., Surrogate] = ppo_clip) -> SurrogateFn:
    """Bind the two clip bounds to a surrogate."""
    return partial(surrogate, clip_low=low, clip_high=high)


_GAE = partial(gae, gamma=1.0, lam=0.95)
_PER_LENGTH = partial(constant, constant_length=1024)
_SOFT_GATE = partial(sapo, gate_positive=1.0, gate_negative=1.05)

_Row = tuple[AdvantageFn, RatioFn, SurrogateFn, WeightingFn]
# fmt: off
_ROWS: dict[str, _Row] = {
    # name          advantage         ratio             surrogate                   weighting
    "ppo":         (_GAE,             token_ratio,      _clip(0.2, 0.2),            token_mean),
    "ppo_penalty": (_GAE,             token_ratio,      unclipped,                  token_mean),
    "grpo":        (group_normalized, token_ratio,      _clip(0.2, 0.2),            sequence_mean),
    "dr_grpo":     (group_centered,    token_ratio,      _clip(0.2, 0.2),            _PER_LENGTH),
    "dapo":        (group_normalized, token_ratio,      _clip(0.2, 0.28),           token_mean),
    "gspo":        (group_normalized, sequence_ratio,   _clip(3e-4, 4e-4),          sequence_mean),
    "cispo":       (group_normalized, token_ratio,      _clip(1.0, 0.28, cispo),    token_mean),
    "rloo":        (leave_one_out,    completion_ratio, _clip(0.2, 0.2, reinforce), sequence_sum),
    "reinforce++": (batch_normalized, token_ratio,      _clip(0.2, 0.2),            token_mean),
    "sapo":        (group_normalized, token_ratio,      _SOFT_GATE,                 sequence_mean),
    "dppo_tv":     (group_normalized, token_ratio,      _clip(0.15, 0.15, dppo_tv), token_mean),
    "maxrl":       (group_over_mean,  token_ratio,      _clip(0.2, 0.2),            token_mean),
    "distil":      (per_token_reward, token_ratio,      _clip(0.2, 0.2),            token_mean),
}
# fmt: on
_PENALTIES = {"ppo_penalty": PenaltyController(coefficient=1.0, target=0.01)}  # at their start
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        name: Algorithm(
            advantage=advantage,
            ratio=ratio,
            surrogate=surrogate,
            weighting=weighting,
            uses_critic=advantage is _GAE,
            penalty=_PENALTIES.get(name),
        )
        for name, (advantage, ratio, surrogate, weighting) in _ROWS.items()
    }
)
