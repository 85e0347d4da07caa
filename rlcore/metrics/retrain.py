"""The metrics of retraining: the drift gate and the gate of the reward model."""

from __future__ import annotations

from rlcore.metrics.base import Metric

RETRAIN = (
    Metric(
        name="drift/psi",
        formula="max over columns of Σ_bins (p - q) ln(p / q) less its mean by chance, p accepted shares, q new ones",
        unit="–",
        healthy="below 0.1",
        meaning="Population stability index of the column that has moved most from the last accepted data.",
        fix="read drift.md: it names the column and what moved in it",
    ),
    Metric(
        name="drift/ks",
        formula="max over columns and edges of |P - Q|, cumulative shares",
        unit="0 to 1",
        healthy="below 0.1",
        meaning="Largest difference of cumulative shares among the columns that have an order.",
        fix="as for drift/psi",
    ),
    Metric(
        name="drift/columns_moved",
        formula="number of columns beyond a threshold and beyond chance",
        unit="columns",
        healthy="0",
        meaning="How many columns warn or refuse.",
        fix="as for drift/psi",
    ),
    Metric(
        name="retrain/rm_accuracy",
        formula="share of held-out pairs, new to both reward models, that the new one ranks right",
        unit="0 to 1",
        healthy="above retrain.min_accuracy",
        meaning="The new reward model on the new held-out pairs.",
        fix="look at the preference snapshot, or train longer",
    ),
    Metric(
        name="retrain/rm_agreement",
        formula="share of the same pairs on which the new and the champion's reward model prefer the same answer",
        unit="0 to 1",
        healthy="above retrain.min_agreement",
        meaning="Whether the new reward model wants what the last one wanted.",
        fix="read reward_gate.md: it shows the pairs on which the two disagree",
    ),
    Metric(
        name="retrain/rm_gain",
        formula="mean over the same pairs of new right - previous right",
        unit="share of pairs",
        healthy="above -retrain.accuracy_margin",
        meaning="What the new reward model gains over the champion's.",
        fix="as for retrain/rm_agreement",
    ),
)
