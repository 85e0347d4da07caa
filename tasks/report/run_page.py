"""Report of a run: one self-contained HTML page, in the state directory and in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlcore.tasks.drawing.levels import format_level, other_levels
from rlcore.tasks.drawing.plots import eval_points
from rlcore.tasks.drawing.result import of_kind
from rlcore.tasks.keys.cache_keys import level_of
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.compare.page import accuracy_table
from rlcore.tasks.kinds.compare.step import evaluations_in
from rlcore.tasks.presets.graph import contrasts, evaluated_data
from rlcore.tasks.presets.key_reference import REQUIRED, Key, describe
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.promotion.approvers import read_approvers
from rlcore.tasks.report import run_data as data
from rlcore.tasks.report.rollout_traces import rollout_traces
from rlcore.tasks.report.run_data import Origin
from rlcore.tasks.run.prefect_bridge import current_flow_run, report_link, report_markdown
from rlcore.tasks.run.stages import PipelineRun
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import code_version
from rlcore.tasks.store.markdown import code
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.store.toml_files import read_prices
from rlcore.tasks.tracking.runs import results_links, save_results_view
from rlcore.tasks.tracking.traces import log_traces

FILE = "report.html"
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow's interface shows as a run's description
_COLUMNS = ("eval/accuracy", "reward/mean")  # of the stages' runs, in the list of runs
_MAX_DESCRIPTION = 5000  # characters, MLflow's limit for a tag
Refs = Mapping[str, ArtifactRef]


@dataclass(frozen=True, kw_only=True)
class StageLine:
    """Result and cost of one stage. ``was_run``: computed in this run; else cached, with its original cost.

    ``tokens``, ``memory_gib`` and the ``level`` of its intervals are None if the stage measures none, ``cost`` without
    a price. ``versions`` are those of its libraries.
    """

    name: str
    was_run: bool
    sha256: str
    seconds: float
    tokens: float | None
    memory_gib: float | None
    cost: float | None
    versions: Mapping[str, str]
    level: float | None = None


_written: list[Path] = []  # by this process: another one may write reports in the same state directory


def last_report(home: Home) -> Path | None:
    """Return the report that this process wrote last in a state directory."""
    return next((path for path in reversed(_written) if path.is_relative_to(home.root)), None)


def publish_report(
    run: PipelineRun, config: RunConfig, refs: Refs, *, started: str, origin: Origin | None = None
) -> Path:
    """Write the page of a finished run, attach it to the run in MLflow, link it in Prefect, and return its path.

    The run in MLflow gets the page's table as description, the accuracies as metrics, and links. The runs of RL stages
    get some rollouts as traces, unless they have some already.

    ``started``: start of the pipeline in the time format of records; a stage with an older record was cached.
    ``origin``: command and preset; the addresses of its runs are added here.
    """
    folder = run.home.root / "reports" / run.parent.run_id
    folder.mkdir(parents=True, exist_ok=True)
    lines = stage_lines(run, config, refs, started=started)
    folders = {name: run.store.path(ref) for name, ref in refs.items()}
    path = folder / FILE
    flow_run = current_flow_run()
    prefect = flow_run.url if flow_run else ""
    known = replace(origin or Origin(), run_id=run.parent.run_id, mlflow=run.parent.url, prefect=prefect)
    _written.append(path)
    currency = read_prices(run.home).currency
    page = render(config, refs, folders, lines, started=started, origin=known, currency=currency)
    path.write_text(page, encoding="utf-8")
    run.parent.log_artifact(path, "report")
    _describe_run(run, config, folders, path, known)
    for line in lines:
        if line.name in of_kind("rl", folders):
            log_traces(
                run.tracker, refs[line.name].mlflow_run_id, rollout_traces(line.name, folders, contrasts(config))
            )
    if run.parent.url:
        report_link("run report", f"{run.parent.url}/artifacts/report/{FILE}")
    report_markdown("run report", f"{_headline(config, folders) or 'no comparison in this run'}\n\n{code(path)}")
    return path


def _describe_run(run: PipelineRun, config: RunConfig, folders: Mapping[str, Path], path: Path, origin: Origin) -> None:
    summaries = {name: read_json(each / "summary.json") for name, each in evaluations_in(folders).items()}
    table = accuracy_table(summaries, confidence=config.evaluation.confidence) if summaries else ""
    page = f"[report/{FILE}]({origin.mlflow}/artifacts/report/{FILE})" if origin.mlflow else f"`report/{FILE}`"
    figures = {"accuracy": "eval/accuracy", "cut": "completion/truncated", "problems": "eval/problems"}
    metrics = {
        f"{label}/{name}": row[key] for name, row in summaries.items() for label, key in figures.items() if key in row
    }
    run.parent.log_metrics(metrics)
    save_results_view(run.parent, [*(name for name in metrics if name.startswith("accuracy/")), *_COLUMNS])
    parts = [
        _headline(config, folders),
        table,
        f"MLflow: {results_links(run.parent)}.",
        f"Report: {page} among the artifacts, and {code(path)}.",
        f"Prefect: {origin.prefect}" if origin.prefect else "",
        f"Made by {code(origin.command)}" if origin.command else "",
    ]
    run.parent.set_tags({DESCRIPTION: "\n\n".join(filter(None, parts))[:_MAX_DESCRIPTION]})


def _headline(config: RunConfig, folders: Mapping[str, Path]) -> str:
    return "; ".join(
        f"{row['new']} against {row['old']}: {row['word']} ({row['difference'].mean:+.3f})"
        for row in data.differences(folders, contrasts(config), confidence=config.evaluation.confidence)
    )


def stage_lines(run: PipelineRun, config: RunConfig, refs: Refs, *, started: str) -> list[StageLine]:
    """Return a line per stage, in the order of the run."""
    prices, machine = read_prices(run.home), known_machine(config.hardware).facts
    lines = []
    for name, ref in refs.items():
        record = run.cache.find(name, ref.stage_key)
        seconds = record.seconds if record else 0.0
        price = prices.of((record.ingredients["machine"] if record else {}) or machine)
        memory = run.tracker.run_metrics(ref.mlflow_run_id).get("memory/peak_gib")
        line = StageLine(
            name=name,
            was_run=record is not None and record.created >= started,
            sha256=ref.sha256,
            seconds=seconds,
            tokens=data.tokens_of(name, run.store.path(ref)),
            memory_gib=memory,
            cost=None if price is None else seconds / 3600.0 * price,
            versions=record.ingredients["versions"] if record else {},
            level=level_of(record.ingredients) if record else None,
        )
        lines.append(line)
    return lines


def render(
    config: RunConfig,
    refs: Refs,
    folders: Mapping[str, Path],
    lines: list[StageLine],
    *,
    started: str,
    origin: Origin | None = None,
    currency: str = "",
) -> str:
    """Render the page. Texts of models are escaped like all values; only rlcore's drawings are not."""
    content = {**_facts(config, folders, origin or Origin()), **_results(config, folders)}
    content |= {
        "config": config,
        "started": started,
        "code": code_version(),
        "versions": {name: version for line in lines for name, version in line.versions.items() if version},
        "datasets": {name: ref for name, ref in refs.items() if ref.kind == "dataset"},
        "lines": lines,
        "other_levels": other_levels(
            {line.name: line.level for line in lines if line.level}, config.evaluation.confidence
        ),
        "totals": totals(lines),
        "currency": currency,
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(content)


def _facts(config: RunConfig, folders: Mapping[str, Path], origin: Origin) -> dict[str, Any]:
    data_sets = [config.data[name] for name in evaluated_data(config)]
    return {
        "origin": origin,
        "level": format_level(config.evaluation.confidence),
        "explain": data.explain,
        "facts": data.model_facts(config, folders) | data.machine_facts(config),
        "stages": data.stage_facts(config),
        "changed": from_defaults(config),
        "against": from_preset(config, origin.base) if origin.base else [],
        "monitored": sum(min(config.evaluation.num_monitor_problems, each.num_eval) for each in data_sets),
        "marked": data.asks_for_marks(config),
    }


def _results(config: RunConfig, folders: Mapping[str, Path]) -> dict[str, Any]:
    histories, confidence = data.histories_of(folders), config.evaluation.confidence
    return {
        "accuracies": data.accuracies(folders),
        "shapes": data.rollout_shapes(folders),
        "reward_models": data.reward_model_facts(folders),
        "contrasts": data.differences(folders, contrasts(config), confidence=confidence),
        "health": data.health(folders),
        "labels": list(histories),
        "curves": data.curves(histories, confidence=confidence),
        "data_curves": data.data_curves(histories, confidence=confidence),
        "parts": data.reward_parts(histories, confidence=confidence),
        "standings": {label: final[-1] for label, history in histories.items() if (final := eval_points(history))},
        "samples": data.changed_samples(folders, contrasts(config)),
        "extremes": data.extreme_rollouts(folders),
        "gates": data.gates(folders),
        "promotion": read_json(folders["promote"] / "verdict.json") if "promote" in folders else None,
        "is_approved": "promote" in folders and read_approvers(find_home()).are_needed,
        "win_rates": [read_json(folder / "win_rate.json") for folder in of_kind("win_rate", folders).values()],
    }


def totals(lines: list[StageLine]) -> dict[str, float | None]:
    """Return sums over the stages: of those that this run computed, and of all."""
    costs = [line.cost for line in lines if line.cost is not None]
    return {
        "run_seconds": sum(line.seconds for line in lines if line.was_run),
        "seconds": sum(line.seconds for line in lines),
        "tokens": sum(line.tokens or 0.0 for line in lines),
        "memory_gib": max((line.memory_gib for line in lines if line.memory_gib is not None), default=None),
        "cost": sum(costs) if costs else None,
    }


@dataclass(frozen=True, kw_only=True)
class Change:
    """Setting by its dotted name, with its value, and the value that it replaces; empty if it has none.

    Values are TOML, as in :mod:`rlcore.tasks.presets.key_reference`.
    """

    name: str
    value: str
    other: str


def from_defaults(config: RunConfig) -> list[Change]:
    """Return the settings that a preset sets to other values than their defaults, or that have none."""
    return [
        Change(name=name, value=key.value, other="" if key.default == REQUIRED else key.default)
        for name, key in _keys(config)
        if key.value != key.default
    ]


def from_preset(config: RunConfig, base: RunConfig) -> list[Change]:
    """Return the settings in which two presets differ; empty values for settings that one of them lacks."""
    here, there = ({name: key.value for name, key in _keys(each)} for each in (config, base))
    return [
        Change(name=name, value=here.get(name, ""), other=there.get(name, ""))
        for name in dict.fromkeys((*here, *there))
        if name != "name" and here.get(name) != there.get(name)
    ]


def _keys(config: RunConfig) -> Iterator[tuple[str, Key]]:
    for section in describe(config):
        for key in section.keys:
            yield f"{section.path}.{key.name}".lstrip("."), key
