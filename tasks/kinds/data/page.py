"""Page of a prepared dataset: numbers of rows, warnings, and quarantined rows with reasons."""

from __future__ import annotations

from pathlib import Path

from rlcore.data_contracts.gate.report import GateReport, RuleResult
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.markdown import code, plain
from rlcore.tasks.store.storage import read_json


def data_page(result: Result, folder: Path) -> str:
    """Write ``data.md``."""
    document = read_json(result.data / "report.json")
    rules = tuple(RuleResult(**rule) for rule in document.pop("rules"))
    del document["passed"]
    page = render(GateReport(**document, rules=rules))
    (folder / "data.md").write_text(page, encoding="utf-8")
    return page


def render(report: GateReport) -> str:
    """Render the gate's report as Markdown."""
    parts = [
        f"**{report.summary}**",
        f"{report.lines_read:,} lines of {code(report.source)}, as {report.contract}; {report.merged:,} rows were "
        "equal to another row and merged. Unused rows passed the gate but exceed `num_train` and `num_eval`.",
        *(f"**Warning**: {plain(warning)}." for warning in report.warnings),
    ]
    if report.reasons:
        rows = [f"| {plain(reason)} | {count:,} |" for reason, count in report.reasons.items()]
        parts.append("\n".join(["| why rows are in quarantine.jsonl | rows |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
