"""An RL run that gains on one skill and loses another is no champion; one whose prompts hold both skills is.

SFT learns to answer numbers, mostly wrongly, and letters, always right. RL on numbers alone learns to answer them, and
says the same to letters. A KL of 0.05 or 0.2 to the reference on the numbers did not prevent it: -0.43 and -0.31 on
letters, after -0.40 without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.run import run_promotion
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from tests.flows.micro import ONE_LAYER

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
    """The preset and its rows."""
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
    refs = run_promotion(preset, ("hardware.num_threads=1", "data.demonstrations.options={}", *ONE_LAYER, *overrides))
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
