"""A micro run that its budget stops, by the command: exit code, message, and the very weights after the resume."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.flows.conftest import environment, flows_command, run_flows
from tests.flows.homes import record, weights, without


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

    raised = next(word for word in reversed(fix.split()) if word.startswith("budget.tokens="))
    again = run_flows("run", home, raised)
    assert again.returncode == 3, again.stderr  # one more iteration at least, and then that limit
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
