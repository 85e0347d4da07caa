"""Updates in a row, and a checkpoint between them, on the device in each precision."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, LoraConfig, UpdateConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.models.policy import score_sequences
from rlcore.training.checkpoint import CheckpointWriter, load_newest
from rlcore.training.learner import Learner
from tests.gpu import micro

SEQUENCES = micro.sequences()
MODEL = micro.make(LlamaConfig, tie_word_embeddings=True)


def make_learner(kind: str, device: torch.device, dtype: torch.dtype) -> Learner:
    adapter = LoraConfig(rank=4) if kind == "adapter" else LoraConfig()
    policy: Any = micro.placed(MODEL, device, dtype)
    if adapter.rank:
        policy = add_lora(policy.requires_grad_(False), adapter, "policy", seed=0)
    critic = None
    if kind.startswith("critic"):
        backbone = policy if kind == "critic on the backbone" else micro.placed(MODEL, device, dtype)
        critic = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(0))
    name = "ppo" if critic else "grpo"
    placement = CriticConfig(architecture="shared" if kind == "critic on the backbone" else "separate")
    config = micro.rl_config(name, critic=placement, update=UpdateConfig(tokens_per_microbatch=128, lora=adapter))
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


def states_of(learner: Learner) -> torch.Tensor:
    models = [learner.policy] if learner.critic is None else [learner.policy, learner.critic]
    return torch.cat([micro.weights_of(model) for model in models])


@pytest.mark.parametrize("kind", ["full", "adapter", "critic", "critic on the backbone"])
def test_a_run_that_is_resumed_between_two_updates_ends_like_one_that_is_not(
    kind: str, device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = make_learner(kind, device, dtype)
    start = states_of(whole)
    with closing(CheckpointWriter()) as writer:
        whole.update(micro.samples(SEQUENCES, seed=0), seed=0)
        writer.save(tmp_path, 1, whole, run_state={"identity": {}})
        middle = states_of(whole)
        whole.update(micro.samples(SEQUENCES, seed=1), seed=1)  # while the checkpoint is written
    resumed = make_learner(kind, device, dtype)
    assert load_newest(tmp_path, resumed, identity={}) == {"identity": {}}
    assert torch.equal(states_of(resumed), middle)
    resumed.update(micro.samples(SEQUENCES, seed=1), seed=1)
    end = states_of(whole)
    if device.type == "cpu":
        assert torch.equal(states_of(resumed), end)
    # On a GPU sums of atomic additions differ in their last bits, and Adam's first steps do not look at sizes.
    assert float((states_of(resumed) - end).norm()) < 0.02 * float((end - middle).norm())
    assert float((middle - start).norm()) > 0.0


def test_no_cast_weight_outlives_a_step(device: torch.device, dtype: torch.dtype) -> None:
    # One context around all of a stage would keep the weights of the first forward pass, as its cache does.
    half = dtype.itemsize < 4
    with torch.autocast(device.type, dtype=dtype if half else torch.bfloat16, enabled=half):
        learner = make_learner("full", device, dtype)
        score_sequences(learner.policy, SEQUENCES, tokens_per_microbatch=128)
        for step in range(3):
            learner.update(micro.samples(SEQUENCES, seed=step), seed=step)
        found = torch.cat(score_sequences(learner.policy, SEQUENCES, tokens_per_microbatch=128))
    fresh = micro.placed(MODEL, device, dtype)
    fresh.load_state_dict(learner.policy.state_dict())
    expected = torch.cat(score_sequences(fresh, SEQUENCES, tokens_per_microbatch=128))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
