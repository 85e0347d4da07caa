"""Glossary of metrics: name, formula, unit and expected range of each, read from ``metrics.toml``.

Only metrics of that file may be logged: :func:`check_names`. ``python -m rlcore.metrics`` prints the page.
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
    """One metric. ``<…>`` in ``name`` matches any text without a slash.

    ``expected_range``: of a healthy run; ``fix``: what to try otherwise.
    """

    name: str
    formula: str
    unit: str
    expected_range: str
    meaning: str
    fix: str


SECTIONS: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {
        title: tuple(Metric(name=name, **fields) for name, fields in section.items())
        for title, section in _DATA["sections"].items()
    }
)
METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
)
_PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), metric) for name, metric in METRICS.items() if "<" in name]


def is_machine_dependent(name: str) -> bool:
    """Return True if repeating the same computation gives another value, as for speed and memory."""
    found = find_metric(name)
    return found is not None and found in SECTIONS["Speed and memory"]


def find_metric(name: str) -> Metric | None:
    """Return the entry of a logged name: ``reward/term/math`` matches ``reward/term/<name>``."""
    patterned = (metric for pattern, metric in _PATTERNS if pattern.fullmatch(name))
    return METRICS.get(name) or next(patterned, None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Check that all metrics are in the glossary and finite.

    Raises:
        TrainingError: A name that is not in the glossary.
        NonFiniteError: NaN or infinity, with the names of the metrics.
    """
    unknown = [name for name in metrics if find_metric(name) is None]
    if unknown:
        close = difflib.get_close_matches(unknown[0], METRICS, n=1)
        hint = f"did you mean {close[0]}?" if close else "add it to the glossary, rlcore/metrics.toml"
        raise TrainingError(f"unknown metrics: {', '.join(unknown)}", fix=hint)
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"metrics are not finite: {', '.join(bad)}", fix="find the first step with such a value")


def render() -> str:
    """Return the glossary and the health rules as a Markdown page."""
    lines = ["# Metrics"]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", *_head("metric", "formula", "unit", "healthy", "meaning", "otherwise")]
        lines += [_row(f"`{m.name}`", m.formula, m.unit, m.expected_range, m.meaning, m.fix) for m in metrics]
    lines += ["", "## Health rules", "", _DATA["health_rules"]]
    lines += _head("rule", "metric", "warn", "stop", "patience", "meaning", "otherwise")
    return "\n".join([*lines, *map(_rule, RULES)]) + "\n"


def _rule(rule: HealthRule) -> str:
    limit = LIMITS[rule.name]
    sign = ">" if limit.is_upper else "<"
    limits = (f"{sign} {limit.warn:g}", f"{sign} {limit.stop:g}", f"{limit.patience}")
    return _row(rule.name, f"`{rule.metric}`", *limits, rule.message, rule.fix)


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _row(name: str, *cells: str) -> str:
    # A bar ends a cell. Markdown reads <name> as HTML, except between backticks.
    escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {name} | {' | '.join(escaped)} |"


if __name__ == "__main__":
    sys.stdout.write(render())
