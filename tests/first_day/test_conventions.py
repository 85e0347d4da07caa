"""The habits of somebody who comes from TRL or verl: names of keys."""

from __future__ import annotations

from pathlib import Path

from tests.flows.conftest import environment
from tests.flows.warm import run_warm


def rlcore(*arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and all output of the command, run in the user's folder."""
    done = run_warm(arguments, environment(folder / ".rlcore"), folder)
    return done.returncode, done.stdout + done.stderr


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
