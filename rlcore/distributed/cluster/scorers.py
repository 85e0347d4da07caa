"""Scorers on a cluster, behind the reward of a run: each part of it is asked of whichever scorer is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from rlcore.config import RewardTerm, to_dict
from rlcore.distributed.cluster.ray_cluster import Cluster, RemoteProcess
from rlcore.errors import RewardError
from rlcore.hardware.runtime import Runtime
from rlcore.rewards.base import RewardFn
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.table import RewardResources, build_rewards, untrained
from rlcore.types import Rollout, Score

_NUM_CHUNKS = 4  # of rollouts for each scorer, so that who is done early takes more


class RemoteReward:
    """Part ``number`` of a reward, computed by ``scorers``; ``known_as``: the same part, of this process.

    Rollouts are dealt in lots that the number of scorers alone decides. A scorer that died is replaced by Ray, which
    asks it again.
    """

    def __init__(self, known_as: RewardFn, number: int, scorers: Sequence[RemoteProcess]) -> None:
        self.name, self.known_as = known_as.name, known_as
        self._number, self._count = number, len(scorers)
        self._free: SimpleQueue[RemoteProcess] = SimpleQueue()
        for scorer in scorers:
            self._free.put(scorer)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """
        Raises:
            RewardError: a scorer is gone for good.
        """
        size = -(-len(rollouts) // (_NUM_CHUNKS * self._count))
        lots = [rollouts[start : start + size] for start in range(0, len(rollouts), max(1, size))]
        with ThreadPoolExecutor(self._count) as threads:
            return [score for scores in threads.map(self._score, lots) for score in scores]

    def _score(self, lot: Sequence[Rollout]) -> Sequence[Score]:
        scorer = self._free.get()
        try:
            found: Sequence[Score] = scorer.ask("score", self._number, lot)["result"]
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
    """The reward of ``terms``, whose parts the scorers of a cluster compute; ``models``: trained ones by their stage.

    ``tokens_per_microbatch``: of reward models; ``prefill``: what the chat template writes before each completion.

    Raises:
        ConfigError: as :func:`rlcore.rewards.table.build_rewards`.
    """
    has_card = runtime.device.type == "cuda" and cluster.placement.ray.reward_worker_gpus > 0.0
    setup = {
        "terms": [to_dict(term) for term in terms],
        "models": {name: folder.absolute() for name, folder in models.items()},
        "device": "cuda" if has_card else "cpu",
        "dtype": str(runtime.compute_dtype).removeprefix("torch."),
        "threads": cluster.placement.ray.cpus,
        "tokens_per_microbatch": tokens_per_microbatch,
        "prefill": prefill,
    }
    restarts = cluster.placement.max_restarts
    scorers = [
        cluster.launch("scorer", number, setup=setup, restarts=restarts, lost=RewardError)
        for number in range(cluster.placement.ray.num_reward_workers)
    ]
    resources = RewardResources(score_tokens=dict.fromkeys(models, untrained), prefill=prefill)
    with build_rewards(terms, resources=resources) as here:  # says what the parts are, and scores nothing
        parts = [
            replace(part, reward=RemoteReward(part.reward, number, scorers)) for number, part in enumerate(here.parts)
        ]
        yield WeightedReward(parts)
