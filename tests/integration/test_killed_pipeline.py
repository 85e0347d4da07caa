"""A pipeline under embedded Prefect, killed with SIGKILL, and the next one over the same home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker
from tests.processes import wait_for_line
from tests.waiting import LONG

SERVER = "prefect.server.api.server:create_app"  # what the command line of an embedded Prefect server holds


PIPELINE = """
import time
from dataclasses import dataclass, field
from prefect import flow
from rlcore.config import HardwareConfig
from rlcore.tasks.run.prefect_bridge import call_flow
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.base import StageResult
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.settings import BudgetConfig
from rlcore.tasks.presets.settings import TrackingConfig

@dataclass
class Config:
    name: str = "toy"
    seed: int = 0
    retrain: None = None
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)

seconds = 0.0

def step(context):
    (context.folder / "x").write_text("x")
    print("in the stage", flush=True)
    time.sleep(seconds)
    return StageResult(metrics={})

@flow(name="toy", persist_result=False)
def toy():
    stage = Stage(name="step", artifact="x", run=step, sections=lambda config: Sections({}))
    run_pipeline([stage], Config(), ["step"], home=find_home(), experiment="toy")

def main():
    call_flow(toy)
    print("finished", flush=True)
"""
MAIN = """
from rlcore.tasks.store.settings import configure_environment, configure_logging, find_home
configure_environment(find_home())
configure_logging()
import toy_pipeline
toy_pipeline.seconds = {seconds}
toy_pipeline.main()
"""


@pytest.mark.slow
def test_a_killed_pipeline_is_healed_by_the_next_one_in_all_three_places(tracked_home: Home, tmp_path: Path) -> None:
    (tmp_path / "toy_pipeline.py").write_text(PIPELINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"RLCORE_HOME": str(tracked_home.root), "RLCORE_ENGINE": "prefect"}

    def start(seconds: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN.format(seconds=seconds)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
        )

    with start(600) as first:
        wait_for_line(first, "in the stage")
        (server,) = [child for child in psutil.Process(first.pid).children() if SERVER in child.cmdline()]
        first.kill()
    assert server.is_running()

    with start(0) as second:
        output, _ = second.communicate(timeout=LONG)
    assert "finished" in output
    for text in (
        f"ended the Prefect server {server.pid}",
        "marked KILLED (2 with its stages)",
        "marked CRASHED",
        "removed the unfinished output of stage",
    ):
        assert text in output, output
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    client = open_tracker(tracked_home).client
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [each.info.status for each in runs] == ["FINISHED", "FINISHED"]  # the pipeline's and its stage's went on
    assert [each.data.tags["restarts"] for each in runs] == ["1", "1"]
