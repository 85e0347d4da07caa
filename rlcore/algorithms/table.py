"""Every algorithm as a row of pure functions. A new one is one row here and one test; nothing else knows the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rlcore.algorithms import advantages, surrogates, weighting
from rlcore.algorithms.advantages import AdvantageFn
from rlcore.algorithms.ratios import RatioFn, sequence_ratio, token_ratio
from rlcore.algorithms.surrogates import SurrogateFn, ppo_clip
from rlcore.algorithms.weighting import WeightingFn


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
    plain_gae = partial(advantages.gae, gamma=gamma, lam=lam)
    adaptive_gae = partial(advantages.length_adaptive_gae, gamma=gamma, alpha=lam_alpha)
    clip = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    return {
        "ppo": Algorithm(
            advantage=adaptive_gae if lam_alpha > 0.0 else plain_gae,
            ratio=token_ratio,
            surrogate=clip,
            weighting=weighting.token_mean,
            uses_critic=True,
            value_advantage=partial(advantages.gae, gamma=gamma, lam=lam if lam_value is None else lam_value),
        ),
        "grpo": Algorithm(
            advantage=advantages.group_normalized,
            ratio=token_ratio,
            surrogate=clip,
            weighting=weighting.sequence_mean,
        ),
        "dr_grpo": Algorithm(
            advantage=advantages.group_centred,
            ratio=token_ratio,
            surrogate=clip,
            weighting=partial(weighting.constant, length=max_new_tokens),
        ),
        "dapo": Algorithm(
            advantage=advantages.group_normalized,
            ratio=token_ratio,
            surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.28),
            weighting=weighting.token_mean,
        ),
        "gspo": Algorithm(
            advantage=advantages.group_normalized,
            ratio=sequence_ratio,
            surrogate=partial(ppo_clip, clip_low=3e-4, clip_high=4e-4),
            weighting=weighting.sequence_mean,
        ),
        "cispo": Algorithm(
            advantage=advantages.group_normalized,
            ratio=token_ratio,
            surrogate=partial(surrogates.cispo, clip_low=1.0, clip_high=0.28),
            weighting=weighting.token_mean,
        ),
        "rloo": Algorithm(
            advantage=advantages.leave_one_out,
            ratio=token_ratio,
            surrogate=surrogates.reinforce,
            weighting=weighting.sequence_mean,
        ),
        "reinforce++": Algorithm(
            advantage=advantages.batch_normalized,
            ratio=token_ratio,
            surrogate=clip,
            weighting=weighting.token_mean,
        ),
        "sapo": Algorithm(
            advantage=advantages.group_normalized,
            ratio=token_ratio,
            surrogate=partial(surrogates.sapo, gate_positive=1.0, gate_negative=1.05),
            weighting=weighting.sequence_mean,
        ),
        "dppo_tv": Algorithm(
            advantage=advantages.group_normalized,
            ratio=token_ratio,
            surrogate=partial(surrogates.dppo_tv, clip_low=0.15, clip_high=0.15),
            weighting=weighting.token_mean,
        ),
        "maxrl": Algorithm(
            advantage=advantages.group_over_mean,
            ratio=token_ratio,
            surrogate=clip,
            weighting=weighting.token_mean,
        ),
    }


ALGORITHMS: Mapping[str, Algorithm] = algorithms()
