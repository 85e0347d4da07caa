"""Every metric's name, formula, unit and healthy range. ``python -m rlcore.metrics > docs/metrics.md`` makes the page.

A metric is logged under a name of this glossary or not at all: :func:`check_names`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from rlcore.errors import NonFiniteError, TrainingError
from rlcore.metrics.base import Metric
from rlcore.metrics.engine import SERVER
from rlcore.metrics.episodes import EPISODES
from rlcore.metrics.health import HEALTH, render_rules
from rlcore.metrics.memory import MEMORY
from rlcore.metrics.promotion import PROMOTION
from rlcore.metrics.rejection import REJECTION
from rlcore.metrics.retrain import RETRAIN
from rlcore.metrics.reward_model import REWARD_MODEL
from rlcore.metrics.stages import COSTS, ENGINE, STAGES
from rlcore.metrics.training import TRAINING

__all__ = ["METRICS", "Metric", "check_names", "find_metric", "render"]

SECTIONS: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {
        "The update": TRAINING,
        "Episodes with tools": EPISODES,
        "The engine": ENGINE + SERVER,
        "Health": HEALTH,
        "Speed and memory": COSTS + MEMORY,
        "The stages": STAGES,
        "The reward model": REWARD_MODEL,
        "Rejection": REJECTION,
        "Promotion": PROMOTION,
        "Retraining": RETRAIN,
    }
)
METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
)
_PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), metric) for name, metric in METRICS.items() if "<" in name]


def find_metric(name: str) -> Metric | None:
    """The glossary's entry for a logged name: ``reward/part/math`` is found under ``reward/part/<name>``."""
    patterned = (metric for pattern, metric in _PATTERNS if pattern.fullmatch(name))
    return METRICS.get(name) or next(patterned, None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Refuse what the glossary does not know and what no plot can show.

    Raises:
        TrainingError: a name that is not in the glossary.
        NonFiniteError: NaN or infinity, with the names of the metrics that have it.
    """
    unknown = [name for name in metrics if find_metric(name) is None]
    if unknown:
        close = difflib.get_close_matches(unknown[0], METRICS, n=1)
        hint = f"did you mean {close[0]}?" if close else "add it to the glossary in rlcore/metrics"
        raise TrainingError(f"unknown metrics: {', '.join(unknown)}", fix=hint)
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"metrics that are not finite: {', '.join(bad)}", fix="find the first step that shows it")


def render() -> str:
    """The glossary as a Markdown page."""
    lines = [
        "# Metrics",
        "",
        "Made by `python -m rlcore.metrics > docs/metrics.md`; change `rlcore/metrics/`, not this page.",
    ]
    for title, metrics in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | formula | unit | healthy | meaning | otherwise |",
            "|---" * 6 + "|",
        ]
        lines += [_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n" + render_rules()


def _row(metric: Metric) -> str:
    cells = (metric.formula, metric.unit, metric.healthy, metric.meaning, metric.fix)
    # A bar would end the cell; &lt; because Markdown takes <name> for HTML.
    escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| `{metric.name}` | " + " | ".join(escaped) + " |"
