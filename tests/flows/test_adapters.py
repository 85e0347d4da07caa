"""A micro run in which policy, critic and reward model are adapters on one base, inline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlcore.config import HardwareConfig
from rlcore.flows.presets import open_preset
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.memory_meter import weight_bytes
from rlcore.models.reward_ensemble import RewardModel, load_reward_model
from rlcore.models.runtime import Runtime
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.steps.rewards import open_reward_models
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.text.packing import TokenSequence
from tests.flows.conftest import run_flows
from tests.flows.homes import folder
from tests.flows.micro import MICRO
from tests.flows.test_post_train import pages

SETTINGS = (
    'without=["stages.grpo","promotion"]',
    "data.prompts.num_train=64",
    "data.demonstrations.num_train=200",
    "stages.sft.num_steps=20",
    "stages.ppo.num_iterations=2",
    "stages.ppo.update.lora.rank=4",
    "stages.ppo.critic.architecture=lora",
    "stages.ppo.critic.init_from=reward_model",
    "stages.reward_model.backbone.lora.rank=4",
    "evaluation.num_problems=8",
)
RL = open_preset("tiny", [*MICRO, *SETTINGS]).stage("ppo", RlStage).settings
SEQUENCES = [TokenSequence(prompt_ids=(3, 4, 5), completion_ids=tuple(range(6, 6 + n))) for n in (1, 4, 9)]
FLOAT32 = HardwareConfig(num_threads=1, device="cpu", dtype="float32")


def opened(home: Path, runtime: Runtime, policy: AdaptedModel) -> RewardModel:
    """The reward model as a run with this policy opens it."""
    inputs = {"reward_model": folder(home, "reward_model")}
    return open_reward_models(inputs, RL.rewards, runtime, policy)["reward_model"]


@pytest.fixture(scope="module")
def adapted_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the finished run."""
    home = tmp_path_factory.mktemp("adapted")
    done = run_flows("run", home, *SETTINGS)
    assert done.returncode == 0, done.stderr
    return home


def test_the_run_reaches_the_comparison_and_every_model_moved_as_an_adapter(adapted_home: Path) -> None:
    assert "| ppo |" in pages(adapted_home, "compare", "comparison.md")
    history = json.loads((folder(adapted_home, "ppo") / "history.json").read_text())
    assert len(history) == 2
    assert all(row["gradient_norm"] > 0.0 and row["critic/gradient_norm"] > 0.0 for row in history)
    assert all(row["reward/term_std/reward_model"] > 0.0 for row in history)
    for stage in ("reward_model", "ppo"):
        model = folder(adapted_home, stage) / "model"
        assert (model / "model.safetensors").is_file()
        assert (model / "adapter" / "adapter_model.safetensors").is_file()


def test_the_reward_model_stands_on_the_base_of_the_policy_and_rewards_as_its_merged_checkpoint(
    adapted_home: Path,
) -> None:
    with open_runtime(FLOAT32, seed=0) as runtime:
        base = runtime.load_frozen(folder(adapted_home, "sft") / "model")
        policy = add_lora(base, RL.update.lora, "policy", seed=0)
        before = weight_bytes([policy])
        model = opened(adapted_home, runtime, policy)
        assert isinstance(model.members[0].backbone, AdaptedModel)
        assert model.members[0].backbone.base is base
        own = sum(4 * parameter.numel() for parameter in model.members[0].parameters())  # adapter and head, float32
        assert weight_bytes([policy, *model.members]) == before + own
        merged = folder(adapted_home, "reward_model") / "model"
        expected = load_reward_model(runtime.load_frozen(merged), merged).rewards(SEQUENCES, tokens_per_microbatch=64)
        rewards = model.rewards(SEQUENCES, tokens_per_microbatch=64)
        torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-5)
        model.members[0].backbone.name = ""
        untrained = model.rewards(SEQUENCES, tokens_per_microbatch=64)
        assert float((untrained - expected).abs().max()) > 1e-2  # the adapter is worth something
