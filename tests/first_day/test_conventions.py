"""The habits of somebody who comes from TRL or verl: names of keys, a configuration file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.flows.conftest import environment
from tests.flows.warm import run_warm

GRPO = """model_name_or_path: model
dataset_name: data
reward_funcs: [accuracy_reward, my_rewards.brief]
learning_rate: 1e-5
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 16
report_to: wandb
"""
REWARD = """def brief(rollouts):
    return [1.0 if len(rollout.text) < 9 else 0.0 for rollout in rollouts]
"""


def rlcore(*arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and all output of the command, run in the user's folder."""
    done = run_warm(arguments, environment(folder / ".rlcore"), folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    shape = ShapeConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96)
    import_model(ModelConfig(source="scratch", shape=shape, license="MIT"), folder, seed=0)
    return folder


@pytest.fixture
def project(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "grpo.yaml").write_text(GRPO)
    (tmp_path / "data").mkdir()
    rows = [
        {
            "prompt_id": str(number),
            "messages": [{"role": "user", "content": f"{number} + {7 * number % 13} = ?"}],
            "reference": str(number + 7 * number % 13),
            "task": "sums",
        }
        for number in range(400)
    ]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_trl_file_becomes_a_preset_whose_plan_finds_no_error(project: Path) -> None:
    code, said = rlcore("from-trl", "grpo.yaml", folder=project)
    assert (code, said) == (0, "grpo.toml\nnext: rlcore plan grpo.toml\n")
    code, said = rlcore("plan", "grpo.toml", folder=project)
    assert code == 0, said


def test_names_of_peers_lead_to_the_right_key(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("""extends = "rlhf_dpo"
name = "mine"
actor_rollout_ref.rollout.n = 4
algorithm.adv_estimator = "grpo"
[stages.grpo]
kind = "rl"
init_from = "sft"
num_generations = 8
beta = 0.04
max_completion_length = 64
per_device_train_batch_size = 4
num_train_epochs = 1
top_p = 0.9
[stages.grpo.update]
epsilon_high = 0.28
[stages.dpo]
lr = 1e-6
per_device_train_batch_size = 4
""")
    code, said = rlcore("plan", "mine.toml", folder=tmp_path)
    assert code == 2
    for theirs, ours in {
        "actor_rollout_ref": "stages.grpo.group_size",
        "algorithm": "stages.grpo.algorithm",
        "stages.grpo.num_generations": "stages.grpo.group_size",
        "stages.grpo.beta": "stages.grpo.kl.coefficient",
        "stages.grpo.max_completion_length": "stages.grpo.sampling.max_new_tokens",
        "stages.grpo.per_device_train_batch_size": "stages.grpo.prompts_per_iteration",
        "stages.grpo.num_train_epochs": "stages.grpo.num_iterations",
        "stages.grpo.update.epsilon_high": "stages.grpo.update.objective.clip_high",
        "stages.dpo.lr": "stages.dpo.learning_rate",
        "stages.dpo.per_device_train_batch_size": "stages.dpo.batch_size",
    }.items():
        assert f"{theirs}: unknown key; did you mean {ours}?" in said
    assert "stages.grpo.top_p: unknown key; TRL's top_p has no counterpart: a filtered distribution" in said
