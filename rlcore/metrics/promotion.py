"""The metrics of the promotion gate."""

from __future__ import annotations

from rlcore.metrics.base import Metric

PROMOTION = (
    Metric(
        name="promotion/promoted",
        formula="1 if every check passed, else 0",
        unit="0 or 1",
        healthy="–",
        meaning="Whether the challenger may take the champion's place.",
        fix="read the verdict's page: it names the checks that failed",
    ),
    Metric(
        name="promotion/look",
        formula="number of pairs judged on this version of the held-out prompts, this one included",
        unit="looks",
        healthy="below 10",
        meaning="The level falls as alpha / (t (t + 1)) with look t. 0: the challenger is the champion already.",
        fix="make fresh held-out prompts: they start at look 1",
    ),
    Metric(
        name="promotion/gain",
        formula="mean over problems of challenger right - champion right",
        unit="share of problems",
        healthy="above promotion.min_gain",
        meaning="What the challenger gains. Not logged for a first champion.",
        fix="train longer, or look at the problems lost on the verdict's page",
    ),
    Metric(
        name="promotion/failed_checks",
        formula="number of checks that did not pass",
        unit="checks",
        healthy="0",
        meaning="How many conditions the challenger broke.",
        fix="as for promotion/promoted",
    ),
)
