"""The budget of a run: amounts over attempts and kills, stops between turns and stages, and what a plan says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.preflight.preset_checks import above_budget, budget_errors, uncounted
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import BudgetConfig
from rlcore.tasks.run.budget import Meter, Spent, budget_period, metered
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import BudgetReachedError, Home
from rlcore.tasks.store.storage import write_table
from rlcore.tasks.store.toml_files import prices_path
from rlcore.tasks.tracking.runs import open_tracker
from tests.processes import wait_for_line
from tests.toys import ToyConfig, no_sections

TOKENS = 10  # of a turn
JUDGED = (
    """stages.judged={kind="win_rate",policy="grpo",baseline="sft",data=["prompts"],"""
    """judge={kind="judge",options={base_url="http://judge:1/v1",model="m"}},sampling={max_new_tokens=8}}"""
)


def config(**limits: float) -> RunConfig:
    return ToyConfig.run(budget=BudgetConfig(**limits))


def loop(context: StageContext) -> StageResult:
    """Four turns of ten tokens, of which each is kept in the work folder like a checkpoint."""
    done = context.work / "turns"
    for turn in range(len(done.read_text()) + 1 if done.exists() else 1, 5):
        context.run_task("iteration", turn, lambda: None)
        context.tracker.log_metrics({"loss": 1.0 / turn}, step=turn)
        done.write_text("x" * turn)
        context.report_progress("turns", turn, 4, {"rollouts/tokens": float(TOKENS)})
    (context.folder / "turns").write_text(done.read_text())
    return StageResult(metrics={"win_rate/cost": 2.5})


def after(context: StageContext) -> StageResult:
    (context.folder / "x").write_text("x")
    return StageResult(metrics={})


STAGES = [
    Stage(name="loop", artifact="x", run=loop, sections=no_sections),
    Stage(name="after", artifact="x", run=after, sections=no_sections, inputs=("loop",)),
]


def run(home: Home, config: RunConfig) -> None:
    with budget_period(home, config, resume="rlcore run toy --set {}".format):
        run_pipeline(STAGES, config, ["after"], home=home, experiment="toy")


def stop(home: Home, config: RunConfig) -> BudgetReachedError:
    with pytest.raises(BudgetReachedError) as raised:
        run(home, config)
    return raised.value


def states(home: Home) -> list[tuple[str, str]]:
    """Name and status of each run in MLflow."""
    client = open_tracker(home).client
    found = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return sorted((each.info.run_name, each.info.status) for each in found)


def test_a_stop_between_turns_resumes_with_a_higher_limit_and_is_no_outcome(tracked_home: Home) -> None:
    error = stop(tracked_home, config(tokens=15))
    assert "budget.tokens = 15 is reached" in error.what
    assert "tokens 20" in error.what
    assert error.what.endswith("stopped before iteration 3")
    assert error.fix == "resume it: rlcore run toy --set budget.tokens=35"
    assert StageCache(tracked_home.cache).records("loop") == ()
    assert states(tracked_home) == [("toy", "KILLED"), ("toy loop", "KILLED")]

    assert "tokens 20" in stop(tracked_home, config(tokens=18)).what  # of the first attempt: nothing more is spent
    run(tracked_home, config(tokens=100))
    assert states(tracked_home) == [("toy", "FINISHED"), ("toy after", "FINISHED"), ("toy loop", "FINISHED")]
    (record,) = StageCache(tracked_home.cache).records("loop")
    assert (tracked_home.root / record.ref.uri / "turns").read_text() == "xxxx"
    history = open_tracker(tracked_home).client.get_metric_history(record.ref.mlflow_run_id, "loss")
    assert [point.step for point in history] == [1, 2, 3, 4]


def test_a_limit_that_a_stage_has_reached_stops_before_the_next_one(tracked_home: Home) -> None:
    error = stop(tracked_home, config(judge_cost=2.0))
    assert error.what.endswith("stopped before the stage after")
    assert len(StageCache(tracked_home.cache).records("loop")) == 1
    assert "budget.judge_cost=4.500" in error.fix
    run(tracked_home, config(judge_cost=4.5))


def test_a_completed_run_ends_the_period_and_a_cached_one_spends_nothing(tracked_home: Home) -> None:
    for _ in range(2):
        run(tracked_home, config(tokens=4 * TOKENS + 1))
        assert list((tracked_home.root / "budgets").iterdir()) == []


def test_hours_cost_the_price_of_the_machine(tracked_home: Home) -> None:
    prices_path(tracked_home).write_text("per_hour = {cpu = 3.6e9}")  # 1 for each microsecond
    error = stop(tracked_home, config(cost=0.5))
    assert error.what.startswith("budget.cost = 0.5 is reached")
    assert error.what.endswith("stopped before the stage loop")
    assert "budget.hours" in stop(tracked_home, config(hours=1e-9)).what


def test_amounts_add_up_over_attempts_of_one_command_and_of_no_other(tracked_home: Home) -> None:
    for _ in range(2):
        with metered(tracked_home, config()) as meter:
            meter.add(Spent(tokens=3.0, judge_cost=0.5))
    with metered(tracked_home, config(tokens=1)) as meter:  # the budget itself is not among the values of a command
        assert (meter.spent.tokens, meter.spent.judge_cost) == (6.0, 1.0)
    with metered(tracked_home, replace(config(), seed=1)) as meter:
        assert meter.spent.tokens == 0.0


KILLED = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from rlcore.tasks.run import budget
budget.WRITE_SECONDS = 0.05
budget.known_machine = lambda _: SimpleNamespace(facts={})  # without two seconds of PyTorch
from rlcore.tasks.presets.settings import BudgetConfig
from tests.toys import ToyConfig
from rlcore.tasks.store.settings import Home
with budget.metered(Home(Path(sys.argv[1])), ToyConfig.run(budget=BudgetConfig())) as meter:
    meter.add(budget.Spent(tokens=7.0))
    time.sleep(0.3)
    print("counted", flush=True)
    time.sleep(600)
"""


def test_a_kill_loses_no_more_than_the_last_seconds(home: Home) -> None:
    command = [sys.executable, "-c", KILLED, str(home.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        wait_for_line(process, "counted")
        process.send_signal(signal.SIGKILL)
    with metered(home, config()) as meter:
        assert meter.spent.tokens == 7.0
        assert meter.spent.seconds >= 0.2


def test_an_unreadable_file_of_an_attempt_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"seconds": 3.0, "tokens": 1.0, "judge_cost": 0.0}')
    assert Meter(tmp_path, BudgetConfig(), 0.0).spent.seconds == pytest.approx(3.0, abs=1.0)


def test_tokens_of_evaluations_and_chunks_are_counted_once_over_killed_attempts(tmp_path: Path) -> None:
    (tmp_path / "work" / "chunks").mkdir(parents=True)
    write_table(pd.DataFrame({"num_tokens": [3, 4]}), tmp_path / "answers.parquet")
    write_table(pd.DataFrame({"completion_ids": [[1], [1, 2]]}), tmp_path / "work" / "chunks" / "chunk-00000.parquet")
    for _ in range(3):  # attempts that die after the count
        meter = Meter(tmp_path / "none", BudgetConfig(), 0.0)
        meter.count_stage(tmp_path, tmp_path / "work", {"win_rate/cost": 0.5})
        meter.write()
        assert (meter.spent.tokens, meter.spent.judge_cost) == (3 + 4 + 1 + 2, 0.5)


def test_a_limit_that_could_never_be_reached_is_an_error_of_the_preset(home: Home) -> None:
    preset = open_preset("tiny", ["budget.cost=1.0", "budget.judge_cost=1.0", JUDGED])
    cost, judge = budget_errors(preset, home)
    assert cost.startswith("budget.cost: ")
    assert "has no price of 'cpu'" in cost
    assert judge.startswith("budget.judge_cost: set stages.judged.judge.options.prompt_price")
    prices_path(home).write_text("per_hour = {cpu = 1.0}")
    priced = open_preset(
        "tiny", ["budget.cost=1.0", "budget.judge_cost=1.0", JUDGED.replace('"m"', '"m",prompt_price=1.0')]
    )
    assert list(budget_errors(priced, home)) == []


def test_a_plan_warns_of_a_limit_below_its_estimate_and_of_costs_that_nobody_counts(home: Home) -> None:
    preset = open_preset("tiny", ["budget.hours=1.0", "budget.cost=5.0"])
    prices_path(home).write_text("per_hour = {cpu = 4.0}")
    assert list(above_budget(preset, home, 3600.0)) == []
    hours, cost = above_budget(preset, home, 7200.0)
    assert hours.startswith("warning: budget.hours = 1 is below the estimate of 2")
    assert cost.startswith("warning: budget.cost = 5 is below the estimate of 8")
    rated = "stages.grpo.rewards=[{kind='judge',options={base_url='http://judge:1/v1',model='m'}}]"
    assert list(uncounted(open_preset("tiny", [rated]))) == []
    assert len(list(uncounted(open_preset("tiny", [rated, "budget.judge_cost=1.0"])))) == 1
