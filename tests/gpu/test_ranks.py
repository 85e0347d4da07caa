"""A learner in shards on a mesh of one is the plain learner, on the device in each precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, UpdateConfig
from rlcore.hardware.sharded import Ranks, ShardConfig, gather_full, open_ranks, shard
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import score_sequences
from rlcore.training.learner import Learner
from tests.gpu import micro

SEQUENCES = micro.sequences()
MODEL = micro.make(LlamaConfig, tie_word_embeddings=True)


def make_learner(
    kind: str, device: torch.device, dtype: torch.dtype, ranks: Ranks | None, *, offload: bool = False
) -> Learner:
    policy: Any = micro.placed(MODEL, device, dtype)
    critic = ScalarHeadModel.with_random_head(policy, torch.Generator().manual_seed(0)) if kind == "ppo" else None
    if ranks is not None:
        shard(critic or policy, ranks, ShardConfig(offload=offload), device=device)
    placement, update = CriticConfig(architecture="shared"), UpdateConfig(tokens_per_microbatch=128)
    config = micro.rl_config(kind, critic=placement, update=update)
    return Learner(policy, critic, algorithm=ALGORITHMS[kind], config=config)


def course(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    """All weights after two updates, and what they say of the sequences then."""
    for seed in range(2):
        learner.update(micro.samples(SEQUENCES, seed=seed), seed=seed)
    scores = torch.cat(score_sequences(learner.policy, SEQUENCES, tokens_per_microbatch=128))
    modules = [learner.policy] if learner.critic is None else [learner.critic]
    return torch.cat([gather_full(p.detach()).flatten().cpu() for m in modules for p in m.parameters()]), scores


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_shards_on_one_device_learn_what_the_plain_model_does(
    kind: str, device: torch.device, dtype: torch.dtype, tmp_path: Path, offload: bool
) -> None:
    weights, scores = course(make_learner(kind, device, dtype, None))
    with open_ranks(0, 1, store=f"file://{tmp_path}/store", device=device, timeout=60.0) as ranks:
        learner = make_learner(kind, device, dtype, ranks, offload=offload)
        assert {p.device.type for p in learner.policy.parameters()} == {"cpu" if offload else device.type}
        found, found_scores = course(learner)
    bound = 1e-5 if device.type == "cpu" else 0.02  # atomic additions; Adam's first steps do not look at sizes
    assert micro.distance(found, weights.double()) < bound
    assert float((found_scores - scores).abs().mean()) < 10 * bound
