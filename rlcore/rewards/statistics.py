"""What the parts of a reward did in one iteration, as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlcore.types import Score


def part_statistics(scored: Sequence[Score], *, all_scores: Sequence[Score]) -> dict[str, float]:
    """Per part: mean, population std and share of zeros over ``scored``, share without a value over ``all_scores``.

    ``reward/part/<name>``, ``reward/part_std/<name>``, ``reward/part_zero/<name>``, ``reward/part_unscored/<name>``.
    Values are those before weighting and gates; rollouts that a part is not on are not counted for it.
    """
    metrics = dict[str, float]()
    for name in sorted({name for score in scored for name in score.parts}):
        values = [score.parts[name] for score in scored if name in score.parts]
        mean = sum(values) / len(values)
        metrics[f"reward/part/{name}"] = mean
        metrics[f"reward/part_std/{name}"] = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        metrics[f"reward/part_zero/{name}"] = values.count(0.0) / len(values)
        asked = [score for score in all_scores if name.removesuffix("_std") not in score.skipped]
        metrics[f"reward/part_unscored/{name}"] = sum(name not in score.parts for score in asked) / len(asked)
    return metrics
