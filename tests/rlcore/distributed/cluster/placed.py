"""The components of a run on a cluster, whatever Ray it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcore.config import CheckpointConfig, DistributedConfig, KlConfig, RayConfig, RewardTerm, SamplingConfig
from rlcore.distributed.build import LearnerPlan
from rlcore.distributed.cluster.ray_cluster import open_cluster
from rlcore.distributed.cluster.remote import cluster_ranks, open_samplers, open_scorers
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.loop import Components
from rlcore.models.runtime import Runtime
from tests.waiting import LONG

RUNTIME = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
TERMS = (RewardTerm(kind="tests.rlcore.distributed.cluster.scoring:even"),)
SETTINGS: dict[str, Any] = {
    "num_iterations": 4,
    "prompts_per_iteration": 4,
    "group_size": 3,
    "rewards": TERMS,
    "sampling": SamplingConfig(max_new_tokens=8),
    "learning_rate": 1e-3,
    "kl": KlConfig(coefficient=0.1),
    "checkpoints": CheckpointConfig(every_iterations=1),
}


def placement(*, ranks: int = 1, samplers: int = 2, scorers: int = 1, **settings: Any) -> DistributedConfig:
    given = {"timeout_minutes": LONG / 60.0} | settings
    return DistributedConfig(
        backend="ray",
        learner_ranks=ranks,
        ray=RayConfig(num_rollout_workers=samplers, num_reward_workers=scorers),
        **given,
    )


@contextmanager
def placed_components(
    components: Components, start: Path, where: DistributedConfig, log: Callable[[str], None]
) -> Iterator[Components]:
    with (
        open_cluster(where, gpus=False, log=log) as cluster,
        open_scorers(cluster, TERMS, {}, RUNTIME, tokens_per_microbatch=512, prefill="") as reward,
    ):
        engine = open_samplers(cluster, start, RUNTIME, max_concurrent=64)
        plan = LearnerPlan(start=start, critic_start=start, config=components.config, seed=0)
        ranks = cluster_ranks(cluster, RUNTIME.device)
        with closing(DistributedLearner(plan, where, RUNTIME, log=log, ranks=ranks)) as learner:
            yield dataclasses.replace(components, learner=learner, engine=engine, sampler=engine, reward=reward)
