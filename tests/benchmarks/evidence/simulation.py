"""Made-up runs: right answers whose probability has an effect of the seed, of the run and of the problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from benchmarks.evidence.statistics import ALPHA, Difference, difference, noise, problem_variance

Right = dict[str, dict[int, NDArray[np.float64]]]


def made_up(sds: Sequence[float], *, seeds: int, gain: float, rng: np.random.Generator, problems: int = 200) -> Right:
    """Draw the answers of arms 0, 1, …; ``sds``: deviations of their accuracies between runs; 0 gains ``gain``."""
    chance = 0.3 + rng.normal(size=(seeds, 1)) * 0.05 + rng.normal(size=(seeds, len(sds))) * sds
    chance[:, 0] += gain
    hard, luck = rng.normal(size=(seeds, 1, problems)), rng.normal(size=(seeds, len(sds), problems))
    right = (hard + luck) / np.sqrt(2.0) < ndtri(chance.clip(0.01, 0.99))[:, :, None]  # half of it is the problem's
    return {str(arm): {seed: right[seed, arm].astype(float) for seed in range(seeds)} for arm in range(len(sds))}


def pairs(arms: int) -> list[Mapping[str, float]]:
    """Contrasts of neighbours, and of each arm with the fourth after it."""
    chosen = [*pairwise(range(arms)), *((arm, arm + 4) for arm in range(arms - 4))]
    return [{str(first): 1.0, str(second): -1.0} for first, second in chosen]


def intervals(right: Right, contrasts: Sequence[Mapping[str, float]]) -> list[Difference]:
    """Return each contrast with its corrected interval."""
    values = {arm: {seed: float(each.mean()) for seed, each in runs.items()} for arm, runs in right.items()}
    between = noise(values)
    found = []
    for weights in contrasts:
        per_seed = [sum(w * values[arm][seed] for arm, w in weights.items()) for seed in right["0"]]
        spread = [problem_variance(weights, {arm: right[arm][seed] for arm in weights}) for seed in right["0"]]
        found.append(difference(weights, per_seed, between=between, problems=spread, alpha=ALPHA / len(contrasts)))
    return found
