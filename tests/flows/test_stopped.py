"""Runs that end early: by Ctrl-C, by a budget, by a health rule, or killed with rollouts ahead."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.flows.conftest import environment, flows_command, run_flows
from tests.flows.homes import folder, kill_when, record, weights, without
from tests.flows.micro import WRECKED
from tests.waiting import LONG


def start_run(home: Path, engine: str) -> subprocess.Popen[str]:
    variables = environment(home) | {"RLCORE_ENGINE": engine}
    command = flows_command("run")
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
    )


def interrupt(process: subprocess.Popen[str], after: str, number: signal.Signals) -> list[str]:
    """Send a signal to the whole group after a line, and wait for the end: what the process said since."""
    assert process.stdout is not None
    for line in process.stdout:
        if after in line:
            break
    else:
        raise AssertionError(f"the run never said {after!r}")
    os.killpg(process.pid, number)
    process.wait(LONG)
    return process.stdout.readlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "number", "code"),
    [
        ("inline", signal.SIGINT, 130),
        ("prefect", signal.SIGINT, 130),
        ("prefect", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_run_ends_with_one_line_and_the_next_one_ends_with_the_same_bytes(
    micro_home: Path, tmp_path: Path, engine: str, number: signal.Signals, code: int
) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    with start_run(home, engine) as first:
        said = interrupt(first, "grpo: iteration 2/4", number)
        assert first.returncode == code, said
    assert said[-1].startswith("interrupted; the same command resumes from iteration "), said
    assert said[-1].endswith(" of grpo\n")
    if number == signal.SIGINT:  # nothing but what was under way tells of anything
        assert [line for line in said[:-1] if "iteration" not in line or "Crash" in line] == []
        assert len(said) <= 3, said
    gone = int(said[-1].split()[-3])
    assert 2 <= gone <= 5
    assert not [each for each in psutil.process_iter(["environ"]) if belongs(each, home)]

    second = start_run(home, engine)
    output, _ = second.communicate(timeout=LONG)
    assert second.returncode == 0, output
    assert f"resume: after iteration {gone - 1} of 4" in output
    assert weights(home, "grpo") == weights(micro_home, "grpo")


def belongs(process: psutil.Process, home: Path) -> bool:
    """Return True if a process still works for a home."""
    is_dead = process.status() == psutil.STATUS_ZOMBIE
    return not is_dead and (process.info["environ"] or {}).get("RLCORE_HOME") == str(home)


def test_a_run_that_its_budget_stopped_ends_with_the_bytes_of_one_that_was_never_stopped(
    micro_home: Path, tmp_path: Path
) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    stopped = run_flows("run", home, "budget.tokens=1")
    assert stopped.returncode == 3, stopped.stderr
    (line,) = [each for each in stopped.stderr.splitlines() if each.startswith("error (budget): ")]
    assert "budget.tokens = 1 is reached" in line
    assert line.endswith("stopped before iteration 2")
    fix = stopped.stderr.splitlines()[-1]
    assert fix.startswith("  fix:   resume it: rlcore run tiny --set ")
    assert fix.count("budget.tokens=") == 1
    assert not (home / "cache" / "grpo").exists() or not list((home / "cache" / "grpo").glob("*.json"))

    finished = run_flows("run", home)
    assert finished.returncode == 0, finished.stderr
    assert "resumes at iteration" in finished.stderr
    assert weights(home, "grpo") == weights(micro_home, "grpo")
    assert record(home, "grpo")["key"] == record(micro_home, "grpo")["key"]
    assert list((home / "budgets").glob("*")) == []


def test_a_plan_names_a_machine_without_a_price(micro_home: Path, tmp_path: Path) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    refused = run_flows("plan", home, "budget.cost=1.0")
    assert refused.returncode == 2
    assert "budget.cost: " in refused.stderr
    assert "has no price of 'cpu'" in refused.stderr


@pytest.mark.slow
def test_under_prefect_a_stop_is_a_failed_run_that_nothing_heals(micro_home: Path, tmp_path: Path) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    variables = environment(home) | {"RLCORE_ENGINE": "prefect"}
    done = subprocess.run(
        flows_command("run", "budget.tokens=1"), capture_output=True, text=True, env=variables, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "Crash" not in done.stderr
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        states = [row[0] for row in database.execute("SELECT state_type FROM flow_run")]
        names = [row[0] for row in database.execute("SELECT event FROM events")]
    assert states == ["FAILED"]
    assert "prefect.flow-run.Failed" in names
    assert "rlcore.stage.failed" not in names


ALONE = 'without=["stages.ppo"]'


def policies(home: Path, length: int) -> dict[bool, Path]:
    records = [json.loads(path.read_text()) for path in (home / "cache" / "grpo").glob("*.json")]
    same = [each for each in records if each["ingredients"]["config"]["stage"]["num_iterations"] == length]
    return {"outcome" in each["ingredients"]: home / str(each["ref"]["uri"]) for each in same}


def plan_of_grpo(home: Path, *overrides: str) -> str:
    done = run_flows("plan", home, ALONE, *overrides)
    assert done.returncode == 0, done.stderr
    return next(" ".join(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("grpo "))


NINE = ("stages.grpo.num_iterations=9", *WRECKED)
OFTEN = (*NINE, "stages.grpo.checkpoints.every_iterations=1")


@pytest.fixture(scope="module")
def wrecked(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The home and the log of a run with one checkpoint, after the first iteration."""
    home = Path(shutil.copytree(micro_home, tmp_path_factory.mktemp("wrecked") / "home"))
    done = run_flows("run", home, ALONE, *NINE, "stages.grpo.checkpoints.every_iterations=0")
    assert done.returncode == 0, done.stderr
    return home, done.stderr


def test_a_wrecked_run_is_stopped_and_its_result_is_the_last_healthy_checkpoint(wrecked: tuple[Path, str]) -> None:
    home, log = wrecked
    folder = policies(home, 9)[True]
    health = json.loads((folder / "health.json").read_text())
    history = json.loads((folder / "history.json").read_text())
    stopped = health["stopped"]
    is_over = [row["kl/ref"] > 0.03 for row in history + stopped["dropped"]]
    first_over = next(place for place, pair in enumerate(itertools.pairwise(is_over), start=1) if all(pair))
    # Rollouts of an iteration show the weights after the one before: two iterations back they were healthy.
    assert stopped["result_iteration"] == len(history) == first_over - 2
    assert stopped["iteration"] == first_over + 1 < 9
    assert len(history) + len(stopped["dropped"]) == stopped["iteration"]
    assert [finding["level"] for finding in health["findings"] if finding["rule"] == "kl"][-2:] == ["alarm", "stop"]
    assert "stopped after iteration" in log
    assert "restore iteration=" in log and "from_checkpoint=1 " in log
    assert plan_of_grpo(home, *OFTEN).startswith("cached")  # which checkpoints there are decides no number
    stops = stopped["iteration"]
    weak = plan_of_grpo(home, *OFTEN, "health.action='warn'")
    assert weak.endswith(f"health.kl stopped the earlier run after iteration {stops}, and no longer does"), weak


@pytest.mark.slow  # two more runs; tests/tasks/keys/test_earlier_work.py has what an earlier run is good for
def test_a_stopped_run_continues_without_its_rule_and_each_result_serves_its_own_rules(
    wrecked: tuple[Path, str], micro_home: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(micro_home, tmp_path / "other"))
    done = run_flows("run", other, ALONE, *OFTEN)
    assert done.returncode == 0, done.stderr
    stopped, again = policies(wrecked[0], 9)[True], policies(other, 9)[True]
    weights = "model/model.safetensors"
    assert (again / weights).read_bytes() == (stopped / weights).read_bytes()
    weak = (*OFTEN, "health.action='warn'")
    newest = json.loads((again / "health.json").read_text())["stopped"]["iteration"] - 1
    assert plan_of_grpo(other, *weak).startswith(f"run resumes at iteration {newest + 1} of 9: ")
    done = run_flows("run", other, ALONE, *weak)
    assert f"resume: after iteration {newest} of 9" in done.stderr, done.stderr
    assert policies(other, 9).keys() == {True, False}
    assert plan_of_grpo(other, *OFTEN) == plan_of_grpo(other, *weak) == "cached"
    sooner = plan_of_grpo(other, *OFTEN, "health.kl.patience=1")
    assert sooner == f"run restarts: health.kl stops the earlier run after iteration {newest}"


@pytest.mark.slow
def test_a_run_that_was_never_healthy_fails_with_the_rule_and_its_fix(micro_home: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    done = run_flows("run", home, ALONE, "health.clip.warn=-2.0", "health.clip.stop=-1.0", "health.clip.patience=1")
    assert done.returncode == 1
    assert "health.clip" in done.stderr and "no healthy checkpoint exists" in done.stderr
    assert "lower learning_rate" in done.stderr


AHEAD = "stages.grpo.sampling.staleness=1"


@pytest.mark.slow
def test_rollouts_are_one_update_old_and_a_killed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    micro_home: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for home in (whole, killed):
        shutil.copytree(micro_home, home)
        shutil.rmtree(home / "cache" / "grpo")
        shutil.rmtree(home / "work", ignore_errors=True)
    done = run_flows("run", whole, AHEAD)
    assert done.returncode == 0, done.stderr

    kill_when(killed, "work/*/checkpoints/step-000002", flows_command("run", AHEAD))
    assert not list((killed / "cache" / "grpo").glob("*.json"))
    done = run_flows("run", killed, AHEAD)
    assert done.returncode == 0, done.stderr
    assert "resume: after iteration" in done.stderr

    history = json.loads((folder(whole, "grpo") / "history.json").read_text())
    assert [row["staleness"] for row in history] == [0.0, 1.0, 1.0, 1.0]
    for before, row in itertools.pairwise(history):
        assert before["gradient_norm"] == 0.0 or row["mismatch/max_abs"] > 1e-4  # 1e-6 where both have the same weights
    for number, row in enumerate(history, start=1):
        table = pd.read_parquet(folder(whole, "grpo") / "rollouts" / f"iteration-{number:05d}.parquet")
        assert set(table["policy_version"]) == {max(0, number - 2)}, row
    assert weights(whole, "grpo") == weights(killed, "grpo")
    tables = [
        [pd.read_parquet(path) for path in sorted((folder(home, "grpo") / "rollouts").glob("*.parquet"))]
        for home in (whole, killed)
    ]
    assert all(one.equals(other) for one, other in zip(*tables, strict=True))
