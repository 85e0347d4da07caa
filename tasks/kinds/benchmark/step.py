"""Benchmark of a checkpoint: scores of all documents, and their means with intervals."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from rlcore.config.answers import BenchmarkConfig
from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.results import BENCHMARK_RECORDS
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.intervals import accuracy, mean_fraction
from rlcore.extras import install_command
from rlcore.models.integrity import verify_model
from rlcore.tasks.drawing.levels import format_interval
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.base import MODEL, RECORDS, StageContext, StageResult
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.tasks.store.storage import file_sha256, write_json, write_table


def run_benchmark(context: StageContext, *, policy: str) -> StageResult:
    """Evaluate the checkpoint of the stage ``policy``. The artifact has a record of each document and a summary.

    Raises:
        ConfigError: the extra is not installed, or a file is no task.
        DataError: a file cannot be read.
    """
    config: BenchmarkConfig = context.config.stage.settings
    try:
        from rlcore.sampling.lm_eval import LmEvalModel, evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"stages.{context.stage} needs the evaluation harness, which is not installed ({error.name})",
            fix=install_command("benchmarks"),
        ) from error
    folder = context.inputs[policy] / MODEL
    tokenizer = verify_model(context.inputs[policy], stage=policy, model=folder)
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        model = LmEvalModel(runtime.load_frozen(folder), tokenizer, config, seed=context.seed)
        records = evaluate(model, config, cache=context.work / "tables")
    table = pd.DataFrame(records)
    require(table, BENCHMARK_RECORDS)
    write_table(table, context.folder / RECORDS)
    found = summarize(table, seed=context.seed, confidence=context.config.confidence)
    document = {"policy": context.config.stage.policy, "tasks": found}
    write_json(document, context.folder / "benchmark.json")
    context.tracker.log_artifact(context.folder / "benchmark.json", "evaluation")
    for each in found:
        interval = format_interval(each["low"], each["high"], context.config.confidence)
        context.log(f"task={each['task']} {each['metric']}={each['mean']:.3f} {interval}")
    return StageResult(metrics=metrics_of(found), rows=len(table), contract=BENCHMARK_RECORDS.name)


def summarize(table: pd.DataFrame, *, seed: int, confidence: float) -> list[dict[str, Any]]:
    """Return each task's mean metrics: with Wilson's interval for a fraction, else a bootstrap over documents."""
    found = []
    for (task, metric), part in table.groupby(["task", "metric"], sort=False):
        values = part["value"].tolist()
        is_share = set(values) <= {0.0, 1.0}
        interval = (
            accuracy([value == 1.0 for value in values], confidence=confidence)
            if is_share
            else mean_fraction(values, seed=seed, confidence=confidence)
        )
        found.append({"task": task, "metric": metric, "is_share": is_share, **dataclasses.asdict(interval)})
    return found


def metrics_of(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the stage's metrics by their glossary names."""
    return {
        f"benchmark/{each['task']}/{each['metric'].removesuffix(',none').replace(',', '.')}{end}": each[key]
        for each in found
        for key, end in (("mean", ""), ("low", "_low"), ("high", "_high"))
    }


def task_files(config: Sections) -> str:
    """Return a digest of the names and contents of all files in the task folder.

    Raises:
        DataError: the folder has none.
    """
    folder = Path(config.stage.settings.folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise DataError("no files of tasks", where=str(folder), fix="name the folder with <task>.yaml")
    listed = [[path.relative_to(folder).as_posix(), file_sha256(path)] for path in paths]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
