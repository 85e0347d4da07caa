"""Reward workers on a cluster, behind the reward of a run: any free worker scores a term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from rlcore.config import RewardTerm
from rlcore.distributed.cluster.ray_cluster import Cluster, RemoteProcess
from rlcore.errors import RewardError
from rlcore.models.runtime import Runtime
from rlcore.rewards.base import RewardFn
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.table import RewardResources, build_rewards, placeholder_model
from rlcore.types import Rollout, Score

_NUM_CHUNKS = 4  # chunks of rollouts per worker, which balance the load


class RemoteReward:
    """Term ``number`` of a reward, computed by ``scorers``; ``known_as``: the same term in this process.

    The number of workers alone decides the chunks. Ray replaces a worker that died and repeats its call.
    """

    def __init__(self, known_as: RewardFn, number: int, scorers: Sequence[RemoteProcess]) -> None:
        self.name, self.known_as = known_as.name, known_as
        self._number, self._count = number, len(scorers)
        self._free: SimpleQueue[RemoteProcess] = SimpleQueue()
        for scorer in scorers:
            self._free.put(scorer)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score the rollouts.

        Raises:
            RewardError: A worker is lost.
        """
        size = -(-len(rollouts) // (_NUM_CHUNKS * self._count))
        chunks = [rollouts[start : start + size] for start in range(0, len(rollouts), max(1, size))]
        with ThreadPoolExecutor(self._count) as threads:
            return [score for scores in threads.map(self._score, chunks) for score in scores]

    def _score(self, chunk: Sequence[Rollout]) -> Sequence[Score]:
        scorer = self._free.get()
        try:
            found: Sequence[Score] = scorer.ask("score", self._number, chunk)["result"]
            return found
        finally:
            self._free.put(scorer)


@contextmanager
def open_scorers(
    cluster: Cluster,
    terms: Sequence[RewardTerm],
    models: Mapping[str, Path],
    runtime: Runtime,
    *,
    tokens_per_microbatch: int,
    prefill: str,
) -> Iterator[WeightedReward]:
    """Open the reward of ``terms`` on a cluster.

    Args:
        cluster: Cluster with room for the workers.
        terms: Terms of the reward.
        models: Trained reward models, by stage.
        runtime: Device and precision.
        tokens_per_microbatch: Of reward models.
        prefill: Text that the chat template writes before each completion.

    Raises:
        ConfigError: As in :func:`rlcore.rewards.table.build_rewards`.
    """
    has_gpu = runtime.device.type == "cuda" and cluster.config.ray.reward_worker_gpus > 0.0
    setup = {
        "terms": tuple(terms),
        "models": models,
        "device": "cuda" if has_gpu else "cpu",
        "dtype": str(runtime.compute_dtype).removeprefix("torch."),
        "threads": cluster.config.ray.cpus,
        "tokens_per_microbatch": tokens_per_microbatch,
        "prefill": prefill,
    }
    restarts = cluster.config.max_restarts
    scorers = [
        cluster.launch("scorer", number, setup=setup, restarts=restarts, lost=RewardError)
        for number in range(cluster.config.ray.num_reward_workers)
    ]
    resources = RewardResources(score_tokens=dict.fromkeys(models, placeholder_model), prefill=prefill)
    with build_rewards(terms, resources=resources) as local:  # defines the terms, scores nothing
        yield WeightedReward(
            [
                replace(each, reward=RemoteReward(each.reward, number, scorers))
                for number, each in enumerate(local.terms)
            ]
        )
