"""Gains that were paid with another skill: refused by the prompts of that skill, or by a benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlcore.extras import install_command
from rlcore.flows.flows import promote
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, read_table
from tests.flows.conftest import ROOT, arguments, environment
from tests.flows.homes import folder
from tests.flows.micro import ONE_LAYER
from tests.flows.test_recipes import comparison, overrides_of, small_run
from tests.flows.warm import run_warm

LETTERS = """
[data.letters]
contract = "prompts"
adapter = "prompts"
path = "letters.jsonl"
num_train = 100
num_eval = 100
max_tokens = 88
"""
PRESET = """
extends = "tiny"
name = "two_skills"
without = ["stages.ppo", "stages.reward_model", "data.preferences"]

[data.demonstrations]
adapter = "demonstrations"
path = "demonstrations.jsonl"
num_train = 200
num_eval = 200

[data.prompts]
adapter = "prompts"
path = "numbers.jsonl"
num_train = 100
num_eval = 100

[stages.sft]
num_steps = 50
learning_rate = 5e-3
optim = { warmup_steps = 5 }

[stages.grpo]
num_iterations = 1
prompts_per_iteration = 8
group_size = 8
learning_rate = 1e-9
eval_every = 0
sampling = { max_new_tokens = 8 }
kl = { coefficient = 0.0 }

[evaluation]
num_problems = 100
num_samples = 0
max_new_tokens = 8

[promotion]
min_accuracy = 0.0
max_truncated = 1.0
finished_margin = 0.1
task_margin = 0.1
"""
LEARN = ("stages.grpo.learning_rate=1e-3", "stages.grpo.num_iterations=16")
BOTH = "stages.grpo.prompts={prompts=0.5,letters=0.5}"


def questions() -> Iterator[tuple[str, str, str]]:
    """Questions with their task and what people answer: numbers seldom right (7), letters always (5)."""
    numbers = [f"{number}{sign}" for sign in ("", "+1") for number in range(10, 110)]
    letters = [f"{first}{second}" for first in "abcdefghij" for second in "abcdefghijklmnopqrst"]
    for place, number in enumerate(numbers):
        yield number, "numbers", "7" if place // 2 % 5 == 0 else "3"
    for word in letters:
        yield word, "letters", "5"


def write(folder: Path) -> str:
    right = {"numbers": "7", "letters": "5"}
    rows: dict[str, list[dict[str, Any]]] = {"numbers": [], "letters": [], "demonstrations": []}
    for place, (question, task, said) in enumerate(questions()):
        common = {"messages": [{"role": "user", "content": question}], "task": task}
        split = "eval" if place % 2 else "train"
        rows[task].append({"prompt_id": question, "reference": right[task], "split": split, **common})
        rows["demonstrations"].append(
            {"demonstration_id": question, "completion": f"#### {said}", "reference": said, "split": split, **common}
        )
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "two_skills.toml").write_text(PRESET + LETTERS)
    return str(folder / "two_skills.toml")


def verdict(home: Home, preset: str, *overrides: str) -> dict[str, Any]:
    refs = promote.fn(preset, ("hardware.num_threads=1", "data.demonstrations.options={}", *ONE_LAYER, *overrides))
    found: dict[str, Any] = read_json(home.root / refs["promote"].uri / "verdict.json")["verdict"]
    return found


@pytest.mark.slow
def test_a_gain_that_was_paid_with_another_skill_is_refused_and_a_mixture_keeps_both(
    tracked_home: Home, tmp_path: Path
) -> None:
    preset = write(tmp_path)
    assert verdict(tracked_home, preset)["promote"]  # what SFT has learned

    forgot = verdict(tracked_home, preset, *LEARN)
    checks = {check["name"]: check for check in forgot["checks"]}
    assert not forgot["promote"]
    assert checks["accuracy"]["passed"]  # more problems are solved, and surely so
    assert checks["accuracy on numbers"]["estimate"] > 0.5
    assert checks["accuracy on letters"]["estimate"] < -0.1
    assert forgot["sentence"].startswith("Refused: accuracy on letters changes by -")

    kept = verdict(tracked_home, preset, *LEARN, BOTH)
    checks = {check["name"]: check for check in kept["checks"]}
    assert (kept["promote"], kept["look"]) == (True, 2)
    assert checks["accuracy on numbers"]["estimate"] > 0.5
    assert checks["accuracy on letters"]["low"] > -0.1


is_installed = find_spec("lm_eval") is not None
needs_the_harness = pytest.mark.skipif(not is_installed, reason="lm-eval is not installed: make test-slow")


def promoted(home: Path, *overrides: str) -> dict[str, object]:
    given = arguments("promote", "skills", *overrides_of("skills"), *overrides)
    done = run_warm(given, environment(home), ROOT)
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
def test_benchmark_tasks_are_asked_and_guard_a_promotion(tmp_path: Path) -> None:
    home = small_run(tmp_path, "skills")
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
    """The run of the test before, but that no prompts of the preset hold the skill that is lost."""
    preset = Path(write(tmp_path))
    preset.write_text(PRESET + GUARDED)
    task = (ROOT / "flows/skills/sum_answer.yaml").read_text()
    (tmp_path / "letters.yaml").write_text(re.sub(r"test: .*", "test: words.jsonl", task))
    asked = [word for place, (word, skill, _) in enumerate(questions()) if skill == "letters" and place % 2]
    (tmp_path / "words.jsonl").write_text(
        "".join(json.dumps({"question": word, "value": "5"}) + "\n" for word in asked)
    )

    assert verdict(tracked_home, str(preset))["promote"]  # what SFT has learned
    forgot = verdict(tracked_home, str(preset), *LEARN)
    checks = {check["name"]: check for check in forgot["checks"]}
    assert checks["accuracy"]["passed"] and checks["accuracy"]["estimate"] > 0.5
    guard = checks["letters, exact_match,number"]
    assert not guard["passed"] and guard["high"] < -0.1, guard
    assert not forgot["promote"]
    assert forgot["sentence"].startswith("Refused: letters, exact_match,number changes by -"), forgot["sentence"]
