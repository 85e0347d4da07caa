"""Rollout workers on a cluster as one sampler. Dead ones are replaced, and their prompts sampled again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlcore.distributed.cluster.ray_cluster import Cluster, RemoteBytes, RemoteProcess
from rlcore.distributed.cluster.remote_ranks import RemoteWeights
from rlcore.errors import SamplingError
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.replicas import ReplicatedSampler
from rlcore.types import FailedRollout, Prompt, Rollout


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
        """Return the answer of a sampler that serves the newest version."""
        while True:
            answer = self._process.ask(method, *arguments, weights=weights, policy_version=self._version, **settings)
            if self._newest is None or answer["policy_version"] == self._version:
                return answer
            self._log(f"{self._process.name} was replaced: reload policy_version={self._version} and retry")
            self.load_weights(self._newest, policy_version=self._version)


def open_samplers(cluster: Cluster, model: Path, runtime: Runtime, *, max_concurrent: int) -> Sampler:
    """Open the rollout workers of a cluster, which serve the checkpoint ``model`` as version 0.

    ``runtime``: device and precision; ``max_concurrent``: sequences decoded at the same time by all workers together.
    """
    count = cluster.config.ray.num_rollout_workers
    setup = {
        "model": model,
        "device": runtime.device.type,
        "dtype": str(runtime.compute_dtype).removeprefix("torch."),
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
    return ReplicatedSampler(samplers, _WeightSender(samplers)) if count > 1 else samplers[0]


class _WeightSender:
    """Sends weights to every sampler in parallel."""

    def __init__(self, samplers: Sequence[RemoteSampler]) -> None:
        self._samplers = samplers

    def __call__(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        def load(sampler: RemoteSampler) -> None:
            sampler.load_weights(state, policy_version=policy_version)

        with ThreadPoolExecutor(len(self._samplers)) as threads:
            list(threads.map(load, self._samplers))
