"""Retrainings in small: each has rows, a policy that starts from the champion, an evaluation, a decision."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.store.storage import write_json
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.registry import CHALLENGER, CHAMPION, find_by_sha256, find_version, set_alias
from rlcore.tasks.tracking.runs import open_tracker
from tests.registered import promote
from tests.toys import ToyConfig, no_sections

PRESET, NAME = "tiny", "tiny-grpo"
DAY = 86_400.0
_WEIGHTS = 4096  # bytes of a model


def rows(context: StageContext) -> StageResult:
    """The rows of one day."""
    digest = f"{context.seed:064d}"
    report = {"contract": "prompts/v1", "source": "sums.jsonl", "digest": digest, "num_train": 12, "num_eval": 3}
    write_json(report, context.folder / "report.json")
    (context.folder / "train.parquet").write_bytes(digest.encode())
    return StageResult(metrics={"data/accepted": 12.0}, rows=12, contract="prompts/v1")


def start(context: StageContext, *, uri: str, sha256: str) -> StageResult:
    """A copy of the champion."""
    shutil.copytree(find_home().artifacts / "policy" / sha256 / MODEL, context.folder / MODEL)
    return StageResult(metrics={})


def train(context: StageContext) -> StageResult:
    """A policy with rollouts and some curves."""
    _write_model(context.folder, f"{context.seed}")
    (context.folder / "rollouts").mkdir()
    (context.folder / "rollouts" / "iteration-00001.parquet").write_bytes(os.urandom(1024))
    for step in range(1, 6):
        context.tracker.log_metrics({f"reward/{name}": 1.0 / step for name in ("mean", "std", "max")}, step=step)
    return StageResult(metrics={"reward/mean": 0.2})


def measure(context: StageContext) -> StageResult:
    """An evaluation, or a decision that reads it."""
    write_json({"seed": context.seed, "stage": context.stage}, context.folder / "summary.json")
    return StageResult(metrics={"eval/accuracy": 0.5})


def draw(result: Result, folder: Path) -> str:
    """A page."""
    (folder / "page.md").write_text(f"# {result.stage}\n", encoding="utf-8")
    return "a page"


def table(champion: Mapping[str, str] | None) -> tuple[Stage, ...]:
    """The stages of a retraining from a champion, or of the first training."""
    data = Stage(name="prepare_prompts", artifact="dataset", run=rows, sections=no_sections)
    begin = ()
    if champion:
        run = partial(start, **champion)
        begin = (Stage(name="champion", artifact="checkpoint", run=run, sections=no_sections),)
    inputs = ("prepare_prompts", *(each.name for each in begin))
    policy = Stage(name="grpo", artifact="policy", run=train, sections=no_sections, inputs=inputs, registered_as="grpo")
    measured = partial(Stage, run=measure, sections=no_sections)
    return (
        data,
        *begin,
        policy,
        measured(name="evaluate_grpo", artifact="evaluation", inputs=("grpo", "prepare_prompts"), render_page=draw),
        measured(name="promote", artifact="verdict", inputs=("grpo", "evaluate_grpo")),
    )


def retrain(home: Home, day: int, *, is_better: bool = True) -> Mapping[str, ArtifactRef]:
    """Train on the rows of a day, from the champion if there is one, and promote or refuse the new version."""
    tracker = open_tracker(home)
    champion = find_version(tracker, NAME, CHAMPION)
    model = {"uri": f"models:/{NAME}/{champion.version}", "sha256": champion.sha256} if champion else None
    refs = run_pipeline(table(model), ToyConfig.run(name=PRESET, seed=day), ["promote"], home=home, experiment=PRESET)
    version = find_by_sha256(tracker, NAME, refs["grpo"].sha256)
    assert version is not None
    if is_better:
        promote(home, tracker, version, over=champion)
    else:
        set_alias(tracker, version, CHALLENGER)
    return refs


def age(home: Home, days: float) -> None:
    """Make everything in a state directory older."""
    seconds, cache = days * DAY, StageCache(home.cache)
    for record in read_records(home):
        created = datetime.fromisoformat(record.created).timestamp() - seconds
        older = replace(record, created=datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds"))
        cache.write(record.ingredients["stage"]["name"], older)
    for path in (home.root, *home.root.rglob("*")):
        if not path.name.startswith("mlflow.db"):
            at = path.stat(follow_symlinks=False).st_mtime - seconds
            os.utime(path, (at, at), follow_symlinks=False)
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database, database:
        for table, column in (("model_versions", "creation_time"), ("runs", "deleted_time")):
            database.execute(f"UPDATE {table} SET {column} = {column} - ?", (int(seconds * 1000),))


def _write_model(folder: Path, text: str) -> None:
    (folder / MODEL).mkdir()
    (folder / MODEL / "config.json").write_text(text, encoding="utf-8")
    (folder / MODEL / "model.safetensors").write_bytes(text.encode().ljust(_WEIGHTS, b"-"))
