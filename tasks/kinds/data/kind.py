"""Stages that prepare datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.kind import IMPORT, Lazy, Stage, stage_of_checkpoint, stages_of_data
from rlcore.tasks.presets.data import POLICY
from rlcore.tasks.presets.graph import graders_of, prompt_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, chosen_by, data_sections
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.steps.base import prepare_stage_name
from rlcore.tasks.steps.data_source import resolve_adapter, source_digest
from rlcore.tasks.store.markdown import code, plain
from rlcore.tasks.store.storage import read_json

if TYPE_CHECKING:
    from rlcore.data_contracts.gate.report import GateReport

_GRADING = ("verifiers", "tokens_per_microbatch")  # keys of an evaluation that sampled pairs are labelled with


def data_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that prepares a dataset, from a file or a policy, without held-out prompts of other datasets."""
    data, asked = config.data[name], prompt_data(config)
    held_out = stages_of_data(config, asked[: asked.index(name)] if data.has_prompts else asked)
    stage = partial(
        Stage,
        name=prepare_stage_name(name),
        artifact="dataset",
        render_page=data_page,
        source_digest=_source_digest,
    )
    if resolve_adapter(data) == POLICY:
        step, policy = "rlcore.tasks.kinds.data.sampled_step:run_prepare_sampled", stage_of_checkpoint(data.policy)
        return stage(
            run=partial(Lazy(step), name=name, policy=policy, prompts=asked, held_out=held_out),
            inputs=(policy, *held_out),
            sections=partial(data_sections, name=name, names=("evaluation", "engine", "hardware")),
            observers=tuple(
                f"evaluation.{each.name}" for each in fields(EvaluationConfig) if each.name not in _GRADING
            ),
        )
    graders = graders_of(config, name)
    return stage(
        run=partial(Lazy("rlcore.tasks.kinds.data.step:run_prepare"), name=name, held_out=held_out, graders=graders),
        inputs=(IMPORT, *held_out),
        sections=partial(data_sections, name=name),
        chosen=partial(chosen_by, graders=graders),
    )


def _source_digest(config: Sections) -> Mapping[str, str]:
    (data,) = config.data.values()
    return source_digest(data)


def data_page(result: Result, folder: Path) -> str:
    """Write ``data.md``: numbers of rows, warnings, and quarantined rows with reasons."""
    from rlcore.data_contracts.gate.report import GateReport, RuleResult  # brings pandas

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
