"""The health rules as metrics and as a table of the glossary."""

from __future__ import annotations

from rlcore.config import LIMITS
from rlcore.health import RULES, Rule
from rlcore.metrics.base import Metric

HEALTH = (
    Metric(
        name="health/warnings",
        formula="number of health rules beyond the first of their bounds and within the second",
        unit="rules",
        healthy="0",
        meaning="What the rules warn of after this iteration.",
        fix="the rule's own, in the table of health rules",
    ),
    Metric(
        name="health/alarms",
        formula="number of health rules beyond the second of their bounds",
        unit="rules",
        healthy="0",
        meaning="Rules whose patience is being used up.",
        fix="the rule's own, in the table of health rules",
    ),
)

INTRODUCTION = """
## Health rules

They are held against the curves after every iteration of online RL; section `health` of a preset sets them
(`health.kl.stop = 1.0`, `health.action = "warn"`). A reading beyond *warn* is a line in the log and a finding in the
artifact's `health.json`. One beyond *stop*, *patience* readings in a row, ends the run: its result is the newest
iteration that every rule has seen within its bound, and what came later is set aside. A canary (engine and trainer
disagree, a grader misjudges known answers, a mask is wrong) needs no patience: the run fails at once, and no
checkpoint is written after it.

| rule | metric | warn | stop | patience | what it says | otherwise |
|---|---|---|---|---|---|---|
"""


def render_rules() -> str:
    """The table of the rules with their default bounds, as Markdown."""
    return INTRODUCTION + "\n".join(map(_row, RULES)) + "\n"


def _row(rule: Rule) -> str:
    limit = LIMITS[rule.name]
    sign = ">" if limit.is_upper else "<"
    cells = (
        rule.name,
        f"`{rule.metric}`",
        f"{sign} {limit.warn:g}",
        f"{sign} {limit.stop:g}",
        f"{limit.patience}",
        rule.says,
        rule.fix,
    )
    return "| " + " | ".join(cell.replace("<", "&lt;") for cell in cells) + " |"
