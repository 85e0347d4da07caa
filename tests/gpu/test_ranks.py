"""A learner in shards on a mesh of one is the plain learner, on the device in each precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import UpdateConfig
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
    """GRPO, or PPO with a critic; in shards where there are ranks."""
    policy, critic = micro.placed(MODEL, device, dtype), None
    if kind == "ppo":
        backbone = micro.placed(MODEL, device, dtype)
        critic = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(0))
    for model in filter(None, (policy, critic)) if ranks is not None else ():
        shard(model, ranks, ShardConfig(offload=offload), device=device)
    config = micro.rl_config(kind, update=UpdateConfig(tokens_per_microbatch=128))
    return Learner(policy, critic, algorithm=ALGORITHMS[kind], config=config)


def course(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    """All weights after two updates, and what they say of the sequences then."""
    for seed in range(2):
        learner.update(micro.samples(SEQUENCES, seed=seed), seed=seed)
    scores = torch.cat(score_sequences(learner.policy, SEQUENCES, tokens_per_microbatch=128))
    modules = [learner.policy, *([learner.critic] if learner.critic is not None else [])]
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
