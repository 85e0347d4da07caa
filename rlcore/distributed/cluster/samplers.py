"""Samplers on a cluster, behind the protocol of one: a dead one is replaced, and its prompts are sampled again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rlcore.distributed.cluster.ray_cluster import Cluster, RemoteBytes, RemoteProcess
from rlcore.distributed.cluster.remote_ranks import RemoteWeights
from rlcore.errors import SamplingError
from rlcore.hardware.runtime import Runtime
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.replicas import ReplicatedSampler
from rlcore.types import FailedRollout, Prompt, Rollout


class RemoteSampler:
    """A :class:`~rlcore.sampling.base.Sampler` in a process of a cluster.

    Ray starts it anew when it died, and asks again what it was asked. It serves the first weights then, says so, and is
    given the newest before it computes anything. Draws are decided by seed, place and number: nothing is sampled twice
    to other ends.
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
        assert isinstance(state, RemoteWeights)  # ranks of the same cluster have exported them
        self._process.ask("load", policy_version=policy_version, weights=state.blob)
        self._version, self._newest = policy_version, state

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        return list(self._ask("logprobs", prompt_ids, completion_ids, temperature=temperature)["result"])

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        assert isinstance(state, RemoteWeights)
        return list(self._ask("differing_parts", weights=state.blob)["result"])

    def _ask(self, method: str, *arguments: Any, weights: RemoteBytes | None = None, **settings: Any) -> dict[str, Any]:
        """The answer of a sampler that serves the newest version."""
        while True:
            answer = self._process.ask(method, *arguments, weights=weights, policy_version=self._version, **settings)
            if self._newest is None or answer["policy_version"] == self._version:
                return answer
            self._log(f"{self._process.name} was replaced: it gets version {self._version}, and is asked again")
            self.load_weights(self._newest, policy_version=self._version)


def open_samplers(cluster: Cluster, model: Path, runtime: Runtime, *, max_concurrent: int) -> Sampler:
    """The samplers of a cluster, which serve the checkpoint ``model`` as version 0.

    ``runtime``: what they compute in; ``max_concurrent``: sequences that are decoded at the same time, of all of them.
    """
    count = cluster.placement.ray.num_rollout_workers
    setup = {
        "model": model.absolute(),
        "device": runtime.device.type,
        "dtype": str(runtime.compute_dtype).removeprefix("torch."),
        "threads": cluster.placement.ray.cpus,
        "max_concurrent": -(-max_concurrent // count),
    }
    restarts = cluster.placement.max_restarts
    members = [
        RemoteSampler(
            cluster.launch("sampler", number, setup=setup, restarts=restarts, lost=SamplingError), cluster.log
        )
        for number in range(count)
    ]
    return ReplicatedSampler(members, _Send(members)) if count > 1 else members[0]


class _Send:
    """Hands weights to every sampler at the same time."""

    def __init__(self, members: Sequence[RemoteSampler]) -> None:
        self._members = members

    def __call__(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        def load(member: RemoteSampler) -> None:
            member.load_weights(state, policy_version=policy_version)

        with ThreadPoolExecutor(len(self._members)) as threads:
            list(threads.map(load, self._members))
