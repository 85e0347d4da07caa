"""Commands that compute nothing import nothing that computes, and say the same as always."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.flows.plan import RunPlan
from rlcore.flows.presets import open_preset
from rlcore.tasks.keys.plan import PlanRow
from tests.flows.conftest import ROOT, environment, flows_arguments, states_of

MEASURE = """
import json, sys
from rlcore.flows.cli.app import main
code = main()
heavy = {"torch", "transformers", "numpy", "pandas", "pyarrow", "pandera", "matplotlib", "prefect", "mlflow"}
print(json.dumps([code, sorted(heavy & sys.modules.keys())]))
"""


def run(home: Path, *arguments: str, **variables: str) -> tuple[str, list[str]]:
    """Output of a command in a process of its own, and the libraries that it has imported."""
    command = [sys.executable, "-c", MEASURE, *arguments]
    variables = environment(home) | variables
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    text, _, last = done.stdout.rstrip().rpartition("\n")
    code, imported = json.loads(last)
    assert code == 0, done.stderr
    return text, imported


def test_a_plan_of_cached_stages_imports_no_library(micro_home: Path) -> None:
    plan, imported = run(micro_home, *flows_arguments("plan"))
    assert set(states_of(plan).values()) == {"cached"}
    assert imported == []


def test_results_are_shown_without_a_library(micro_home: Path) -> None:
    shown, imported = run(micro_home, "show", "tiny", *flows_arguments("plan")[3:])
    assert "policy/" in shown
    assert imported == []


def test_a_run_of_cached_stages_starts_no_prefect_and_writes_its_report(micro_home: Path) -> None:
    before = set(micro_home.glob("reports/*/report.html"))
    said, imported = run(micro_home, *flows_arguments("run"), RLCORE_ENGINE="prefect")
    assert "prefect" not in imported
    assert (micro_home / "prefect" / "prefect.db").stat().st_size == 0  # made for its owner, and never used
    (report,) = set(micro_home.glob("reports/*/report.html")) - before
    assert str(report) in said
    assert "<title>tiny: run report</title>" in report.read_text()


@pytest.mark.parametrize(
    ("states", "variables", "expected"),
    [
        (("cached", "cached"), {}, "inline"),
        (("cached", "run"), {}, "prefect"),
        (("cached", "cached"), {"PREFECT_API_URL": "http://server/api"}, "prefect"),  # whose users see each run
        (("cached", "run"), {"RLCORE_ENGINE": "inline"}, "inline"),
    ],
)
def test_prefect_runs_what_is_computed_and_what_a_server_shows(
    states: tuple[str, ...],
    variables: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = tuple(PlanRow(stage=f"stage_{state}", state=state, reason="") for state in states)  # type: ignore[arg-type]
    planned = RunPlan(config=open_preset("tiny"), rows=rows, lines=())
    for name, value in ({"RLCORE_HOME": str(tmp_path), "RLCORE_ENGINE": "", "PREFECT_API_URL": ""} | variables).items():
        monkeypatch.setenv(name, value)
    ran = []
    monkeypatch.setattr("rlcore.flows.plan.plan_run", lambda *_, **__: planned)
    monkeypatch.setattr("rlcore.flows.run.run_targets", lambda *_: ran.append("inline") or {})
    monkeypatch.setattr("rlcore.tasks.run.prefect_bridge.call_flow", lambda *_, **__: ran.append("prefect") or {})
    monkeypatch.setattr("rlcore.tasks.report.summary.summarise", lambda *_, **__: "")
    assert main(["run", "tiny"]) == 0
    assert ran == [expected]
