"""On-policy distillation as a run: a student that says the wrong thing learns a teacher's answer, without a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.kinds.compare.step import greedy_answers
from rlcore.tasks.presets.graph import checkpoints, contrasts, registered_starts
from tests.flows.conftest import ran
from tests.flows.homes import folder, record, weights
from tests.flows.micro import ONE_LAYER
from tests.flows.retraining import RIGHT, write_files

# SFT says the wrong thing four times in five, the teacher always the right one: it has seen nothing else.
PRESET = """
extends = "distil"
without = ["stages.grpo", "promotion"]
name = "taught"

[data.sure]
contract = "demonstrations"
adapter = "demonstrations"
path = "{sure}"
num_train = 150
num_eval = 100
max_tokens = 96

[stages.teacher]
kind = "sft"
init_from = "sft"
data = ["sure"]
num_steps = 30
batch_size = 16
learning_rate = 5e-3

[stages.distil]
ref_policy = "teacher"
"""
SMALL = (
    *ONE_LAYER,
    "stages.sft.num_steps=60",
    "stages.sft.optim.warmup_steps=5",
    "stages.sft.learning_rate=5e-3",
    "stages.distil.num_iterations=20",
    "stages.distil.prompts_per_iteration=48",
    "stages.distil.learning_rate=1e-3",
    "stages.distil.eval_every=0",
    "stages.distil.sampling.max_new_tokens=8",
    "evaluation.num_problems=60",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, data = tmp_path_factory.mktemp("distil"), tmp_path_factory.mktemp("data")
    files = [each for each in write_files(data / "mixed") if not each.startswith("data.preferences")]
    write_files(data / "sure", right=5)
    preset = data / "taught.toml"
    preset.write_text(PRESET.format(sure=data / "sure" / "demonstrations.jsonl"), encoding="utf-8")
    ran(made, preset, *SMALL, *files)
    return made


def answers(home: Path, stage: str) -> list[str]:
    table = greedy_answers(folder(home, f"evaluate_{stage}"))
    return [str(each) for each in table.sort_values("prompt_id")["completion"]]


def test_the_student_comes_to_the_teachers_greedy_answers_without_any_reward(home: Path) -> None:
    assert set(answers(home, "teacher")) == {RIGHT}
    assert answers(home, "distil") == answers(home, "teacher") != answers(home, "sft")
    history = json.loads((folder(home, "distil") / "history.json").read_text())
    assert sum(row["kl/ref"] for row in history[-4:]) / 4 < 0.5 * history[0]["kl/ref"]
    assert history[0]["groups/zero_signal"] < 0.5  # a completion alone that the teacher says something of
    assert {row["reward/mean"] for row in history} == {0.0}


def test_its_teacher_is_an_input_and_it_is_held_against_it(home: Path) -> None:
    assert record(home, "distil")["ingredients"]["inputs"].keys() >= {"sft", "teacher"}
    (page,) = home.glob("pages/*/compare/*/comparison.md")
    assert "| distil - teacher |" in page.read_text()
    assert weights(home, "distil") != weights(home, "sft")


def test_a_reference_may_be_a_registered_champion() -> None:
    config = open_preset("distil", ["stages.distil.ref_policy=models:/mine@champion"])
    assert registered_starts(config) == {"reference_distil": "models:/mine@champion"}
    assert "reference_distil" in checkpoints(config)
    assert ("distil", "reference_distil") in contrasts(config)
    (stage,) = (each for each in stages(config) if each.name == "distil")
    assert {"sft", "reference_distil"} <= set(stage.inputs)
