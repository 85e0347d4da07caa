"""Every algorithm as a row of pure functions. A new one is one row here and one test; nothing else knows the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rlcore.algorithms.advantages import (
    AdvantageFn,
    batch_normalized,
    gae,
    group_centred,
    group_normalized,
    group_over_mean,
    leave_one_out,
    length_adaptive_gae,
)
from rlcore.algorithms.ratios import RatioFn, completion_ratio, sequence_ratio, token_ratio
from rlcore.algorithms.surrogates import Surrogate, SurrogateFn, cispo, dppo_tv, ppo_clip, reinforce, sapo
from rlcore.algorithms.weighting import WeightingFn, constant, sequence_mean, sequence_sum, token_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The four holes of the one formula (see :mod:`rlcore.algorithms.objective`), and whether a critic is trained.

    With a critic, ``advantage`` takes ``gamma`` and ``lam`` from the run's configuration and the result is whitened;
    ``value_advantage``, if given, makes the critic's returns in its place.
    """

    advantage: AdvantageFn
    ratio: RatioFn
    surrogate: SurrogateFn
    weighting: WeightingFn
    uses_critic: bool = False
    value_advantage: AdvantageFn | None = None


def algorithms(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_value: float | None = None,
    lam_alpha: float = 0.0,
    max_new_tokens: int = 1024,
) -> Mapping[str, Algorithm]:
    """The table, with the constants that a run's configuration sets (:class:`rlcore.config.GaeConfig`)."""
    length_adaptive = partial(length_adaptive_gae, gamma=gamma, alpha=lam_alpha)
    policy_gae = length_adaptive if lam_alpha > 0.0 else partial(gae, gamma=gamma, lam=lam)
    value_gae = partial(gae, gamma=gamma, lam=lam if lam_value is None else lam_value)
    per_length = partial(constant, length=max_new_tokens)
    # fmt: off
    rows: dict[str, _Row] = {
        # name          advantage         ratio             surrogate                   weighting
        "ppo":         (policy_gae,       token_ratio,      _clip(0.2, 0.2),            token_mean),
        "grpo":        (group_normalized, token_ratio,      _clip(0.2, 0.2),            sequence_mean),
        "dr_grpo":     (group_centred,    token_ratio,      _clip(0.2, 0.2),            per_length),
        "dapo":        (group_normalized, token_ratio,      _clip(0.2, 0.28),           token_mean),
        "gspo":        (group_normalized, sequence_ratio,   _clip(3e-4, 4e-4),          sequence_mean),
        "cispo":       (group_normalized, token_ratio,      _clip(1.0, 0.28, cispo),    token_mean),
        "rloo":        (leave_one_out,    completion_ratio, _clip(0.2, 0.2, reinforce), sequence_sum),
        "reinforce++": (batch_normalized, token_ratio,      _clip(0.2, 0.2),            token_mean),
        "sapo":        (group_normalized, token_ratio,      _SOFT_GATE,                 sequence_mean),
        "dppo_tv":     (group_normalized, token_ratio,      _clip(0.15, 0.15, dppo_tv), token_mean),
        "maxrl":       (group_over_mean,  token_ratio,      _clip(0.2, 0.2),            token_mean),
    }
    # fmt: on
    table = {
        name: Algorithm(advantage=advantage, ratio=ratio, surrogate=surrogate, weighting=weighting)
        for name, (advantage, ratio, surrogate, weighting) in rows.items()
    }
    return table | {"ppo": replace(table["ppo"], uses_critic=True, value_advantage=value_gae)}


def _clip(low: float, high: float, surrogate: Callable[..., Surrogate] = ppo_clip) -> SurrogateFn:
    """A surrogate with the two bounds that it clips at."""
    return partial(surrogate, clip_low=low, clip_high=high)


_Row = tuple[AdvantageFn, RatioFn, SurrogateFn, WeightingFn]
_SOFT_GATE = partial(sapo, gate_positive=1.0, gate_negative=1.05)
ALGORITHMS: Mapping[str, Algorithm] = algorithms()
