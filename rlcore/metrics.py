"""Every metric's name, formula, unit and healthy range, as ``metrics.toml`` has them.

A metric is logged under a name of that file or not at all: :func:`check_names`. ``python -m rlcore.metrics`` prints the
page.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rlcore.checks.health import RULES, HealthRule
from rlcore.config import LIMITS
from rlcore.errors import NonFiniteError, TrainingError

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. ``<…>`` in ``name`` stands for any text without a slash.

    ``healthy`` is the range or the course that a sound run shows, ``fix`` what to try when it does not.
    """

    name: str
    formula: str
    unit: str
    expected_range: str
    meaning: str
    fix: str


SECTIONS: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {
        title: tuple(Metric(name=name, **said) for name, said in section.items())
        for title, section in _DATA["sections"].items()
    }
)
METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
)
_PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), metric) for name, metric in METRICS.items() if "<" in name]


def is_machine_dependent(name: str) -> bool:
    """Whether a metric tells of the machine that computed: the same computation, done again, gives another number."""
    found = find_metric(name)
    return found is not None and found in SECTIONS["Speed and memory"]


def find_metric(name: str) -> Metric | None:
    """The glossary's entry for a logged name: ``reward/term/math`` is found under ``reward/term/<name>``."""
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
        hint = f"did you mean {close[0]}?" if close else "add it to the glossary, rlcore/metrics.toml"
        raise TrainingError(f"unknown metrics: {', '.join(unknown)}", fix=hint)
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"metrics that are not finite: {', '.join(bad)}", fix="find the first step that shows it")


def render() -> str:
    """The glossary and the health rules as a Markdown page."""
    lines = ["# Metrics"]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", *_head("metric", "formula", "unit", "healthy", "meaning", "otherwise")]
        lines += [_row(f"`{m.name}`", m.formula, m.unit, m.expected_range, m.meaning, m.fix) for m in metrics]
    lines += ["", "## Health rules", "", _DATA["health_rules"]]
    lines += _head("rule", "metric", "warn", "stop", "patience", "what it says", "otherwise")
    return "\n".join([*lines, *map(_rule, RULES)]) + "\n"


def _rule(rule: HealthRule) -> str:
    """A health rule with its default bounds."""
    limit = LIMITS[rule.name]
    sign = ">" if limit.is_upper else "<"
    bounds = (f"{sign} {limit.warn:g}", f"{sign} {limit.stop:g}", f"{limit.patience}")
    return _row(rule.name, f"`{rule.metric}`", *bounds, rule.message, rule.fix)


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _row(name: str, *cells: str) -> str:
    # A bar would end the cell; &lt; because Markdown takes <name> for HTML, but not between backticks.
    escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {name} | {' | '.join(escaped)} |"


if __name__ == "__main__":
    sys.stdout.write(render())
