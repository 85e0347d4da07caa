"""Tasks of the evaluation harness as a stage of a run, and as guards of a promotion."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.extras import install_command
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_table
from tests.flows import test_forgetting as forgetting
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.test_recipes import comparison, overrides_of, ran
from tests.flows.warm import run_warm

is_installed = find_spec("lm_eval") is not None
needs_the_harness = pytest.mark.skipif(not is_installed, reason="lm-eval is not installed: make test-slow")


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
    assert f"stages.skills: the evaluation harness is not installed: {install_command('benchmarks')}" in done.stderr
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


GUARDED = """benchmarks = { skills = 0.1 }

[stages.skills]
kind = "benchmark"
policy = "grpo"
folder = "."
tasks = ["letters"]
"""


@needs_the_harness
@pytest.mark.slow
def test_a_benchmark_refuses_a_gain_that_was_paid_with_its_skill(tracked_home: Home, tmp_path: Path) -> None:
    """The run of test_forgetting.py, but that no prompts of the preset hold the skill that is lost."""
    preset = Path(forgetting.write(tmp_path))
    preset.write_text(forgetting.PRESET + GUARDED)
    task = (ROOT / "flows/skills/sum_answer.yaml").read_text()
    (tmp_path / "letters.yaml").write_text(re.sub(r"test: .*", "test: words.jsonl", task))
    asked = [word for place, (word, skill, _) in enumerate(forgetting.questions()) if skill == "letters" and place % 2]
    (tmp_path / "words.jsonl").write_text(
        "".join(json.dumps({"question": word, "value": "5"}) + "\n" for word in asked)
    )

    assert forgetting.verdict(tracked_home, str(preset))["promote"]  # what SFT has learned
    forgot = forgetting.verdict(tracked_home, str(preset), *forgetting.LEARN)
    checks = {check["name"]: check for check in forgot["checks"]}
    assert checks["accuracy"]["passed"] and checks["accuracy"]["estimate"] > 0.5
    guard = checks["letters, exact_match,number"]
    assert not guard["passed"] and guard["high"] < -0.1, guard
    assert not forgot["promote"]
    assert forgot["sentence"].startswith("Refused: letters, exact_match,number changes by -"), forgot["sentence"]
