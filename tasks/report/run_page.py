"""The report that a run ends with: one HTML page that stands on its own, in the home and in MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlcore.config import RunConfig
from rlcore.config.graph import contrasts
from rlcore.machine import choose_device_and_dtype
from tasks.home.artifacts import ArtifactRef
from tasks.home.code_hash import code_version
from tasks.pipeline.bridge import report_link, report_markdown
from tasks.pipeline.keys import versions
from tasks.pipeline.stages import PipelineRun
from tasks.report import run_data as data
from tasks.report.head_to_head import standings

FILE = "report.html"
Refs = Mapping[str, ArtifactRef]


@dataclass(frozen=True, kw_only=True)
class StageLine:
    """What one stage was and cost. ``was_run``: computed by this run, else cached, and this is what it had cost.

    ``tokens`` and ``memory_gib`` are None where the stage measures none, ``cost`` where there is no price.
    """

    name: str
    was_run: bool
    sha256: str
    seconds: float
    tokens: float | None
    memory_gib: float | None
    cost: float | None


def publish_report(run: PipelineRun, config: RunConfig, refs: Refs, *, started: str) -> Path:
    """Write the page of a finished run, attach it to the run in MLflow, and link it in Prefect; returns its path.

    ``started``: when the pipeline began, as records keep the time; a stage whose record is older was cached.
    """
    folder = run.home.root / "reports" / run.parent.run_id
    folder.mkdir(parents=True, exist_ok=True)
    lines = stage_lines(run, config, refs, started=started)
    folders = {name: run.store.path(ref) for name, ref in refs.items()}
    path = folder / FILE
    path.write_text(render(config, refs, folders, lines, started=started), encoding="utf-8")
    run.parent.log_artifact(path, "report")
    if run.parent.url:
        report_link("run report", f"{run.parent.url}/artifacts/report/{FILE}")
    headline = "; ".join(
        f"{row['new']} against {row['old']}: {row['word']} ({row['difference'].mean:+.3f})"
        for row in data.differences(folders, contrasts(config), confidence=config.evaluation.confidence)
    )
    report_markdown("run report", f"{headline or 'no comparison in this run'}\n\n`{path}`")
    return path


def stage_lines(run: PipelineRun, config: RunConfig, refs: Refs, *, started: str) -> list[StageLine]:
    """One line per stage, in the order of the run."""
    price = hourly_price(config)
    lines = []
    for name, ref in refs.items():
        record = run.cache.find(name, ref.stage_key)
        seconds = record.seconds if record else 0.0
        memory = run.tracker.run_metrics(ref.mlflow_run_id).get("memory/peak_gib")
        line = StageLine(
            name=name,
            was_run=record is not None and record.created >= started,
            sha256=ref.sha256,
            seconds=seconds,
            tokens=data.tokens_of(name, run.store.path(ref)),
            memory_gib=memory,
            cost=seconds / 3600.0 * price if price else None,
        )
        lines.append(line)
    return lines


def hourly_price(config: RunConfig) -> float:
    """What an hour of this run costs: of its GPU, or of its processor cores; 0 without a price."""
    device, _ = choose_device_and_dtype(config.hardware)
    if device.type == "cuda":
        return config.report.price_per_gpu_hour
    cores = config.hardware.num_threads or os.cpu_count() or 1
    return config.report.price_per_core_hour * cores


def render(config: RunConfig, refs: Refs, folders: Mapping[str, Path], lines: list[StageLine], *, started: str) -> str:
    """The page. Whatever a model wrote is text in it: every value is escaped, only our own drawings are not."""
    histories, confidence = data.histories_of(folders), config.evaluation.confidence
    content: dict[str, Any] = {
        "config": config,
        "started": started,
        "code": code_version(),
        "versions": {name: version for name, version in versions().items() if version},
        "datasets": {name: ref for name, ref in refs.items() if ref.kind == "dataset"},
        "lines": lines,
        "totals": totals(lines),
        "accuracies": data.accuracies(folders),
        "contrasts": data.differences(folders, contrasts(config), confidence=confidence),
        "health": data.health(folders),
        "labels": list(histories),
        "curves": data.curves(histories, confidence=confidence),
        "data_curves": data.data_curves(histories, confidence=confidence),
        "parts": data.reward_parts(histories, confidence=confidence),
        "standings": {label: final[-1] for label, history in histories.items() if (final := standings(history))},
        "samples": data.changed_samples(folders, contrasts(config)),
        "extremes": data.extreme_rollouts(folders),
        "gates": data.gates(folders),
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(content)


def totals(lines: list[StageLine]) -> dict[str, float | None]:
    """Sums over the stages: of what this run computed, and of everything."""
    costs = [line.cost for line in lines if line.cost is not None]
    return {
        "run_seconds": sum(line.seconds for line in lines if line.was_run),
        "seconds": sum(line.seconds for line in lines),
        "tokens": sum(line.tokens or 0.0 for line in lines),
        "memory_gib": max((line.memory_gib for line in lines if line.memory_gib is not None), default=None),
        "cost": sum(costs) if costs else None,
    }
