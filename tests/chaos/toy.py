"""A pipeline of three stages that does what large ones do with files, MLflow and Prefect, and computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from prefect import flow

from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.promotion.champion import Grounds, promote
from rlcore.tasks.run.leases import leased
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.run.prefect_bridge import call_flow
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.audit_log import local_actor
from rlcore.tasks.store.settings import configure_environment, configure_logging, find_home
from rlcore.tasks.store.storage import note_digest, read_json, write_json, write_table
from rlcore.tasks.tracking.registry import find_by_sha256
from rlcore.tasks.tracking.runs import open_tracker
from tests.toys import ToyConfig, no_sections

ITERATIONS = 3


def prepare(context: StageContext) -> StageResult:
    write_table(pd.DataFrame({"prompt": [f"{n}+1" for n in range(8)]}), context.folder / "train.parquet")
    context.tracker.log_dataset(context.folder / "train.parquet", name="toy/v1", context="train")
    return StageResult(metrics={"data/accepted": 8.0}, rows=8, contract="toy/v1")


def train(context: StageContext) -> StageResult:
    state, rows = context.work / "state.json", context.work / "rows"
    done = read_json(state)["done"] if state.exists() else 0
    for step in range(done + 1, ITERATIONS + 1):
        context.tracker.log_metrics({"loss": 1.0 / step, "reward": float(step)}, step=step)
        table, sample = rows / f"{step}.parquet", context.work / "samples" / f"{step}.json"
        write_table(pd.DataFrame({"step": [step]}), table)
        note_digest(table)
        write_json({"columns": ["step"], "data": [[step]]}, sample)
        context.tracker.log_table(sample, "samples")
        context.tracker.flush()
        write_json({"done": step}, state)
    (context.folder / MODEL).mkdir()
    (context.folder / MODEL / "config.json").write_text("{}", encoding="utf-8")
    for table in sorted(rows.glob("*")):
        (context.folder / table.name).write_bytes(table.read_bytes())
    context.tracker.log_artifact(rows, "rows")
    return StageResult(metrics={"loss": 1.0 / ITERATIONS, "memory": 2.0})


def judge(context: StageContext) -> StageResult:
    """A verdict, with a curve that no checkpoint of its own makes durable."""
    for step in range(1, ITERATIONS + 1):
        context.tracker.log_metrics({"judged": float(step)}, step=step)
    write_json({"better": True}, context.folder / "verdict.json")
    return StageResult(metrics={"gain": 0.5})


def draw(result: Result, folder: Path) -> str:
    (folder / "page.md").write_text(f"# {result.stage}\n", encoding="utf-8")
    return "a page"


STAGES = (
    Stage(name="data", artifact="dataset", run=prepare, sections=no_sections, render_page=draw),
    Stage(
        name="train",
        artifact="policy",
        run=train,
        sections=no_sections,
        inputs=("data",),
        registered_as="policy",
        render_page=draw,
    ),
    Stage(name="judge", artifact="verdict", run=judge, sections=no_sections, inputs=("train",), render_page=draw),
)


@flow(name="toy", persist_result=False)
def toy() -> None:
    home = find_home()
    refs: Mapping[str, ArtifactRef] = run_pipeline(STAGES, ToyConfig.run(), ["judge"], home=home, experiment="toy")
    tracker = open_tracker(home)
    version = find_by_sha256(tracker, f"{ToyConfig.run().name}-policy", refs["train"].sha256)
    assert version is not None
    grounds = Grounds(over=None, verdict=refs["judge"].sha256, sentence="Promoted: better.")
    with leased(home, "toy"):
        promote(home, tracker, version, grounds, actor=local_actor())


def main(_: list[str]) -> int:
    configure_environment(find_home())
    configure_logging()
    call_flow(toy)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
