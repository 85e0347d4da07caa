"""Tasks of the evaluation harness as a stage of a run, and as guards of a promotion."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.home.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.test_recipes import comparison, overrides_of, ran
from tests.flows.warm import run_warm

is_installed = find_spec("lm_eval") is not None
needs_the_harness = pytest.mark.skipif(not is_installed, reason="lm-eval is not installed: make test-benchmarks")


def promoted(home: Path, *overrides: str) -> dict[str, object]:
    """The newest verdict after a promotion."""
    settings = [part for each in (*overrides_of("skills"), *overrides) for part in ("--set", each)]
    done = run_warm(["promote", "--preset", "skills", *settings], environment(home), ROOT)
    assert "verdict" in done.stderr or done.returncode == 0, done.stderr
    newest = max(home.glob("artifacts/verdict/*/verdict.json"), key=lambda path: path.stat().st_mtime)
    found: dict[str, object] = json.loads(newest.read_text(encoding="utf-8"))["verdict"]
    return found


@pytest.mark.skipif(is_installed, reason="lm-eval is installed")
def test_without_the_harness_the_run_ends_before_anything_is_trained(tmp_path: Path) -> None:
    done = run_warm(["run", "--preset", "skills"], environment(tmp_path), ROOT)
    assert done.returncode != 0
    assert "stages.skills: the evaluation harness is not installed: pip install 'rlcore[benchmarks]'" in done.stderr
    assert not (tmp_path / "artifacts" / "checkpoint").exists()


@needs_the_harness
def test_tasks_are_asked_told_and_guard_a_promotion(tmp_path: Path) -> None:
    home = ran(tmp_path, "skills")
    records = read_table(folder(home, "skills") / "records.parquet")
    assert records.groupby("task").size().to_dict() == {"sum_answer": 8, "sum_choice": 8}
    assert "## skills: benchmark" in comparison(home)
    limits = ("promotion.min_accuracy=0.0", "promotion.max_truncated=1.0")
    assert promoted(home, *limits)["promote"] is True
    checks = promoted(home, *limits, "stages.grpo.learning_rate=1e-3")["checks"]
    assert isinstance(checks, list)
    guards = {check["name"] for check in checks}
    assert guards >= {"sum_choice, acc,none", "sum_answer, exact_match,number"}
