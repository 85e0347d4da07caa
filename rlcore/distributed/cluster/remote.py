"""Learner ranks, samplers and scorers as processes of a cluster, behind the interfaces that local ones have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import load

from rlcore.config import RewardTerm
from rlcore.distributed.cluster.ray_cluster import Cluster, Pending, RemoteBytes, RemoteProcess
from rlcore.distributed.rank_pool import RankPool
from rlcore.distributed.serialization import encode
from rlcore.errors import LearnerLostError, RewardError, SamplingError
from rlcore.models.runtime import Runtime
from rlcore.rewards.base import RewardFn
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.table import RewardResources, build_rewards, placeholder_model
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.replicas import ReplicatedSampler
from rlcore.types import FailedRollout, Prompt, Rollout, Score


class RemoteWeights(Mapping[str, torch.Tensor]):
    """Mapping of weights on a cluster. Samplers there fetch ``blob``; here tensors are loaded on access."""

    def __init__(self, cluster: Cluster, blob: RemoteBytes) -> None:
        self.blob, self._cluster = blob, cluster

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return load(self._cluster.fetch(self.blob))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class RemoteRanks:
    """A :class:`~rlcore.distributed.rank_pool.RankTransport` of Ray processes. ``device``: that of each rank.

    They connect at the first one's machine. A dead rank is not restarted alone, because others may hold its shards.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self.processes: list[RemoteProcess] = []
        self._cluster, self._device = cluster, device
        self._pending: list[Pending] = []

    @property
    def size(self) -> int:
        return len(self.processes)

    def start(self, setups: Sequence[Mapping[str, Any]]) -> None:
        self.processes = [
            self._cluster.launch("rank", number, restarts=0, lost=LearnerLostError) for number in range(len(setups))
        ]
        address: str | None = self.processes[0].begin("address").data()  # None if it died, which receive() reports
        local = {
            "store": f"tcp://{address}",
            "folder": None,
            "threads": self._cluster.config.ray.cpus,
            "device": self._device,
        }
        self._pending = [
            process.begin("begin", encode({**setup, **local}))
            for process, setup in zip(self.processes, setups, strict=True)
        ]

    def send(self, request: bytes) -> set[int]:
        self._pending = [process.begin("ask", request) for process in self.processes]
        return set()  # receive() reports dead ranks

    def receive(self, silent: Collection[int], seconds: float) -> dict[int, bytes | None]:
        waiting = sorted(silent)
        ready = self._cluster.first_of([self._pending[rank] for rank in waiting], seconds)
        return {waiting[index]: self._pending[waiting[index]].data() for index in ready}

    def exit_reason(self, rank: int) -> str:
        return f"is gone ({self.processes[rank].reason()})"

    def exported(self) -> Mapping[str, torch.Tensor]:
        return RemoteWeights(self._cluster, self.processes[0].keep())

    def end(self) -> None:
        for process in self.processes:
            process.end()
        self.processes, self._pending = [], []

    def close(self) -> None:
        """Do nothing, because ended ranks leave no resources."""


def cluster_ranks(cluster: Cluster, device: torch.device) -> RankPool:
    """Return a pool of ranks on a cluster, on devices of the kind of ``device``."""
    return RankPool(RemoteRanks(cluster, torch.device(device.type)), cluster.seconds)


class RemoteSampler:
    """A :class:`~rlcore.sampling.base.Sampler` in a process of a cluster.

    Ray recreates it after it died, and repeats the call. It then serves the first weights, reports so, and gets the
    newest ones before it computes anything. Draws depend only on seed, index and number, so a repeated call samples the
    same.
    """

    def __init__(self, process: RemoteProcess, log: Callable[[str], None]) -> None:
        self._process, self._log = process, log
        self._version = 0
        self._newest: RemoteWeights | None = None

    @property
    def policy_version(self) -> int:
        version: int = self._ask("describe")["policy_version"]
        return version

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        answer = self._ask("sample", prompts, params, seed=seed, places=places)
        return [list(group) for group in answer["result"]]

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        assert isinstance(state, RemoteWeights)  # exported by ranks of the same cluster
        self._process.ask("load", policy_version=policy_version, weights=state.blob)
        self._version, self._newest = policy_version, state

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        return list(self._ask("logprobs", prompt_ids, completion_ids, temperature=temperature)["result"])

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        assert isinstance(state, RemoteWeights)
        return list(self._ask("differing_parts", weights=state.blob)["result"])

    def _ask(self, method: str, *arguments: Any, weights: RemoteBytes | None = None, **settings: Any) -> dict[str, Any]:
        while True:
            answer = self._process.ask(method, *arguments, weights=weights, policy_version=self._version, **settings)
            if self._newest is None or answer["policy_version"] == self._version:
                return answer
            self._log(f"{self._process.name} was replaced: reload policy_version={self._version} and retry")
            self.load_weights(self._newest, policy_version=self._version)


def open_samplers(cluster: Cluster, model: Path, runtime: Runtime, *, max_concurrent: int) -> Sampler:
    """Open the rollout workers of a cluster, which serve the checkpoint ``model`` as version 0.

    ``max_concurrent``: sequences decoded at the same time by all workers together.
    """
    count = cluster.config.ray.num_rollout_workers
    setup = {
        "model": model,
        "runtime": replace(runtime, device=torch.device(runtime.device.type)),
        "threads": cluster.config.ray.cpus,
        "max_concurrent": -(-max_concurrent // count),
    }
    restarts = cluster.config.max_restarts
    samplers = [
        RemoteSampler(
            cluster.launch("sampler", number, setup=setup, restarts=restarts, lost=SamplingError), cluster.log
        )
        for number in range(count)
    ]

    def load(state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda each: each.load_weights(state, policy_version=policy_version), samplers))

    return ReplicatedSampler(samplers, load) if count > 1 else samplers[0]


_NUM_CHUNKS = 4  # chunks of rollouts per worker, which balance the load


class RemoteReward:
    """Term ``number`` of a reward, computed by ``scorers``; ``known_as``: the same term in this process.

    The number of workers alone decides the chunks.
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
        models: Trained reward models, by stage.
        tokens_per_microbatch: Of reward models.
        prefill: Text that the chat template writes before each completion.

    Raises:
        ConfigError: As in :func:`rlcore.rewards.table.build_rewards`.
    """
    has_gpu = runtime.device.type == "cuda" and cluster.config.ray.reward_worker_gpus > 0.0
    setup = {
        "terms": tuple(terms),
        "models": models,
        "runtime": replace(runtime, device=torch.device("cuda" if has_gpu else "cpu")),
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
