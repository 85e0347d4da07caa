"""Page of a win rate: the rate with its interval, the judge's audit, and the cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json

_AUDIT = {
    "agreement": "agreement with human labels",
    "order_dependent": "results that depend on the order",
    "length_bias": "preference for the longer answer beyond that of humans",
    "beyond_length": "agreement, less that of the rule that the longer answer is better",
}


def win_rate_page(result: Result, folder: Path) -> str:
    """Write ``win_rate.md``."""
    page = render(read_json(result.data / "win_rate.json"), confidence=result.confidence)
    (folder / "win_rate.md").write_text(page, encoding="utf-8")
    return page


def headline(summary: Mapping[str, Any]) -> str:
    """Summarize in one line: the win rate, and the reasons to distrust it."""
    rate = summary["found"]["rate"]
    text = f"win rate {_interval(rate)} of {summary['policy']} over {summary['reference']} on {rate['n']} prompts"
    return f"{text}, judged by {summary['judge']}{distrust_reason(summary)}"


def distrust_reason(summary: Mapping[str, Any]) -> str:
    """Return the reason to distrust the judge, as the end of a sentence; empty if it is trusted."""
    return f"; NOT TRUSTED: {'; '.join(summary['distrust'])}" if summary["distrust"] else ""


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    found, audit, unjudged = summary["found"], summary["audit"], summary["unjudged"]
    rows = {
        "win rate": found["rate"],
        "at equal length": found["length_controlled"],
        "results that depend on the order": found["order_dependent"],
    }
    lines = [plain(headline(summary)), "", f"| figure | {format_level(confidence)} interval |", "|---|---|"]
    lines += [f"| {label} | {_interval(interval)} |" for label, interval in rows.items()]
    lines += [
        "",
        f"{found['wins']} won, {found['ties']} tied ({summary['identical']} of them with identical answers), "
        f"{found['losses']} lost, {sum(unjudged.values())} unjudged. The first answer won {found['first']:.3f}.",
        "",
    ]
    lines += [f"Unjudged, {count} times: {plain(reason)}" for reason, count in unjudged.items()]
    lines += ["", f"Judge: {plain(summary['judge'])}.", ""]
    if audit:
        lines += [
            f"| on {audit['agreement']['n']} held-out human pairs | {format_level(confidence)} interval |",
            "|---|---|",
        ]
        lines += [f"| {label} | {_interval(audit[name])} |" for name, label in _AUDIT.items()]
        lines += [
            "",
            *(f"- {'passed' if check['passed'] else 'FAILED'}: {check['sentence']}" for check in audit["checks"]),
        ]
        lines += [
            f"- agreement with the reward model {plain(name)}: {_interval(each['agreement'])}; beyond independent "
            f"errors (0: independent, 1: equal): {_interval(each['excess'])}"
            for name, each in summary["dependence"].items()
        ]
        if audit["beyond_length"]["low"] <= 0:
            lines.append("- note: the judge is not shown to know more of these pairs than the lengths of the answers")
    cost = f", cost {summary['cost']:.4f}" if summary["cost"] else ""
    lines += [
        "",
        f"{summary['calls']} judge calls, {summary['failed_calls']} failed, {summary['tokens']} tokens{cost}.",
    ]
    return "\n".join(lines) + "\n"


def _interval(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"
