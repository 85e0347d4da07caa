"""Processes on a Ray cluster: Ray places each one, restarts it if it died, and reports if it is lost.

Only this module imports Ray, and only if a run uses a cluster. Messages are bytes
(:mod:`rlcore.distributed.serialization`), and weights a safetensors file, which each machine fetches once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from safetensors.torch import load

from rlcore.config.distributed import DistributedConfig
from rlcore.distributed.rank import Served, open_rank
from rlcore.distributed.serialization import decode, decode_error, encode, encode_error, is_error
from rlcore.errors import ConfigError, RlcoreError, ServiceError
from rlcore.extras import install_command
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.rewards.mix import scores_of
from rlcore.rewards.reward_model import token_scorer
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer

Role = Literal["rank", "sampler", "scorer"]
_WAIT_SECONDS = 10.0  # polling interval while the cluster has no room


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Reference to bytes on the cluster."""

    reference: Any


@dataclass(frozen=True, slots=True)
class Pending:
    """Reference to an answer that may not be there yet."""

    ray: ModuleType
    reference: Any

    def data(self) -> Any:
        """Wait for the answer and return it, or None if the process died."""
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayActorError:
            return None


class RemoteProcess:
    """One process of a cluster, called ``name``, which answers requests as bytes."""

    def __init__(self, cluster: Cluster, actor: Any, name: str, lost: type[RlcoreError]) -> None:
        self.name = name
        self._cluster, self._actor, self._lost = cluster, actor, lost

    def begin(self, method: str, *arguments: Any) -> Pending:
        """Call a method of the actor without waiting."""
        return Pending(self._cluster.ray, getattr(self._actor, method).remote(*arguments))

    def ask(self, method: str, *arguments: Any, weights: RemoteBytes | None = None, **settings: Any) -> dict[str, Any]:
        """Return the answer of the hosted object, or of its replacement.

        Ray recreates a process that dies and repeats the call once. A process that times out counts as dead.

        Raises:
            RlcoreError: Raised there; or the process died more often than it may.
        """
        sent = (encode((method, arguments, settings)), *([weights.reference] if weights else []))
        answer: dict[str, Any] = decode(self._wait(self._actor.ask.remote(*sent), method))
        if "error" in answer:
            raise decode_error(answer)
        if is_error(answer):
            raise self._gone(f"failed in {method!r}: {answer.get('crash') or answer['memory']}")
        return answer

    def keep(self) -> RemoteBytes:
        """Return a reference to the exported bytes, which stay on the cluster."""
        return RemoteBytes(self._actor.take.remote())

    def reason(self) -> str:
        """Return Ray's reason why the process is gone."""
        errors = self._cluster.ray.exceptions
        try:
            self._cluster.ray.get(self._actor.address.remote(), timeout=_WAIT_SECONDS)
        except errors.RayActorError as error:
            return _short(error)
        except errors.GetTimeoutError:
            pass
        return "Ray gives no reason"

    def end(self) -> None:
        """Kill the process; Ray does not recreate it."""
        self._cluster.ray.kill(self._actor)

    def _wait(self, reference: Any, method: str) -> bytes:
        ray, seconds = self._cluster.ray, self._cluster.seconds
        while True:
            try:
                found: bytes = ray.get(reference, timeout=seconds)
                return found
            except ray.exceptions.GetTimeoutError:
                self._cluster.log(f"{self.name} timed out after {seconds / 60.0:g} minutes: replaced")
                ray.kill(self._actor, no_restart=False)
            except ray.exceptions.RayError as error:
                raise self._gone(f"is gone, in {method!r}: {_short(error)}") from None

    def _gone(self, how: str) -> RlcoreError:
        return self._lost(f"{self.name} {how}", where="distributed", fix=self._cluster.advice)


class Cluster:
    """A cluster with room for every process of a run.

    ``seconds``: timeout of an answer.
    """

    def __init__(self, ray: ModuleType, config: DistributedConfig, group: Any, *, log: Callable[[str], None]) -> None:
        self.ray, self.config, self.log = ray, config, log
        self.seconds = 60.0 * config.timeout_minutes
        self._group = group

    @property
    def advice(self) -> str:
        """Text with the location of Ray's logs, and with the next step."""
        logs = self.ray.get_runtime_context().get_session_name()
        return f"read Ray's logs of {logs} (/tmp/ray); the same command resumes from the newest checkpoint"

    def launch(
        self, role: Role, number: int, *, setup: Mapping[str, Any] | None = None, restarts: int, lost: type[RlcoreError]
    ) -> RemoteProcess:
        """Start process ``number`` of a role in its reserved room; with a ``setup``, Ray may recreate it.

        ``lost``: error class if it is lost.
        """
        index, gpus = sum(_counts(self.config)[: _ROLES.index(role)]) + number, self._group.bundle_specs
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        kind = self.ray.remote(_ACTORS[role]).options(
            num_cpus=self.config.ray.cpus,
            num_gpus=gpus[index].get("GPU", 0),
            max_restarts=restarts,
            max_task_retries=-1 if restarts else 0,
            scheduling_strategy=strategy,
        )
        actor = kind.remote(role, encode(setup) if setup is not None else b"")
        return RemoteProcess(self, actor, f"{role} {number}", lost)

    def first_of(self, pending: Sequence[Pending], seconds: float) -> list[int]:
        """Wait for one of the answers, and return the indices of those that are ready."""
        references = [each.reference for each in pending]
        ready, _ = self.ray.wait(references, num_returns=1, timeout=seconds)
        return [references.index(each) for each in ready]

    def fetch(self, blob: RemoteBytes) -> bytes:
        """Return the bytes of a reference."""
        found: bytes = self.ray.get(blob.reference)
        return found


_ROLES: tuple[Role, ...] = ("rank", "sampler", "scorer")


@contextmanager
def open_cluster(config: DistributedConfig, *, gpus: bool, log: Callable[[str], None]) -> Iterator[Cluster]:
    """Open a cluster with room for all processes of ``config``, and end them on exit.

    ``gpus``: each rank and each sampler has one.

    Raises:
        ConfigError: Ray is not installed.
        ServiceError: There is no cluster at the address, or it has no room before the timeout.
    """
    ray = _import_ray()
    bundles = _bundles(config, gpus=gpus)
    with connected(ray, config, bundles):
        group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            _wait_for_room(ray, group, bundles, config, log)
            yield Cluster(ray, config, group, log=log)
        finally:
            ray.util.remove_placement_group(group)  # ends what runs in it


def _import_ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "distributed.backend = 'ray' needs Ray, which is not installed",
            where="distributed.backend",
            fix=f"{install_command('ray')}; or set it to 'processes' for the ranks of one machine",
        ) from error
    module: ModuleType = ray
    return module


def _wait_for_room(
    ray: ModuleType,
    group: Any,
    bundles: Sequence[Mapping[str, float]],
    config: DistributedConfig,
    log: Callable[[str], None],
) -> None:
    """Return when Ray has reserved room for every process."""
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    left = 60.0 * config.timeout_minutes
    while not group.wait(min(_WAIT_SECONDS, left)):
        there = ray.cluster_resources()
        has = ", ".join(f"{there.get(kind, 0.0):g} of {count:g} {kind}s" for kind, count in wanted.items() if count)
        left -= _WAIT_SECONDS
        if left <= 0.0:
            raise ServiceError(
                f"the Ray cluster had no room for the run after {config.timeout_minutes:g} minutes: it has {has}",
                where="distributed",
                fix="add machines, lower learner_ranks, ray.num_rollout_workers, ray.num_reward_workers or ray.cpus; "
                "see `ray status`",
            )
        log(f"waiting for room on the Ray cluster: it has {has}")


def _bundles(config: DistributedConfig, *, gpus: bool) -> list[dict[str, float]]:
    ray = config.ray
    own = [1.0 if gpus else 0.0, 1.0 if gpus else 0.0, ray.reward_worker_gpus]
    return [
        {"CPU": float(ray.cpus)} | ({"GPU": share} if share else {})
        for share, count in zip(own, _counts(config), strict=True)
        for _ in range(count)
    ]


def _counts(config: DistributedConfig) -> tuple[int, int, int]:
    return config.learner_ranks, config.ray.num_rollout_workers, config.ray.num_reward_workers


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor ")][-1:] or lines[:1]
    return " ".join(causes)[:300]


class _Host:
    """An actor of the cluster: one rank, one sampler or one scorer, which answers requests as bytes.

    With a setup it opens on creation, also if Ray recreates it after it died. If opening fails, later requests get the
    error.
    """

    def __init__(self, role: Role, setup: bytes = b"") -> None:
        self._role, self._stack = role, ExitStack()
        self._served: Served | None = None
        self._error: dict[str, Any] = {"crash": "it has no setup"}
        if setup:
            self.begin(setup)

    def begin(self, setup: bytes) -> bytes:
        """Open the object of the setup, and return its facts or the error."""
        try:
            self._served = self._stack.enter_context(_OPEN[self._role](decode(setup)))
            return encode(self._served.facts)
        except Exception as error:  # noqa: BLE001 - sent to the caller
            self._error = encode_error(error)
            return encode(self._error)

    def ask(self, request: bytes, weights: bytes | None = None) -> bytes:
        """Answer a request (method, arguments, settings); ``weights``: a safetensors file, its first argument."""
        if self._served is None:
            return encode(self._error)
        method, arguments, settings = decode(request)
        if weights is not None:
            arguments = (load(weights), *arguments)
        return encode(self._served.answer(method, arguments, settings))

    def take(self) -> bytes:
        """Return the exported bytes and drop them."""
        assert self._served is not None
        found, self._served.exported = self._served.exported, b""
        return found

    def address(self) -> str:
        """Return an address and a free port of this machine, as seen from the cluster."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"


class Rank(_Host):
    """A rank, named ``ray::Rank`` in Ray's and in the machine's process lists."""


class Sampler(_Host):
    """A sampler, named ``ray::Sampler``."""


class Scorer(_Host):
    """A scorer, named ``ray::Scorer``."""


_ACTORS: Mapping[Role, type[_Host]] = {"rank": Rank, "sampler": Sampler, "scorer": Scorer}


@contextmanager
def _open_sampler(setup: Mapping[str, Any]) -> Iterator[Served]:
    """Open an engine that serves one version of the weights, and computes nothing for requests of another version.

    An answer has the engine's version, and the result None if the request is for another one. An engine that replaced
    a dead one serves the first weights again.
    """
    torch.set_num_threads(setup["threads"])
    model = setup["runtime"].load_frozen(setup["model"])
    engine = NativeSampler(model, ChatTokenizer.load(setup["model"]), max_concurrent=setup["max_concurrent"])

    def if_current(method: Callable[..., Any], *arguments: Any, policy_version: int, **settings: Any) -> Any:
        return method(*arguments, **settings) if policy_version == engine.policy_version else None

    asked = (engine.sample, engine.logprobs, engine.differing_parts)
    methods: dict[str, Callable[..., Any]] = {each.__name__: partial(if_current, each) for each in asked}
    methods |= {"load": engine.load_weights, "describe": lambda policy_version: None}
    yield Served(methods, state=lambda: {"policy_version": engine.policy_version})


@contextmanager
def _open_scorer(setup: Mapping[str, Any]) -> Iterator[Served]:
    """Open the reward of a run, which scores rollouts by a term, given by its number."""
    torch.set_num_threads(setup["threads"])
    runtime = setup["runtime"]
    scorers = {
        name: token_scorer(load_reward_model(runtime.load_frozen(folder), folder), setup["tokens_per_microbatch"])
        for name, folder in setup["models"].items()
    }
    resources = RewardResources(score_tokens=scorers, prefill=setup["prefill"])
    with build_rewards(setup["terms"], resources=resources) as reward:
        yield Served({"score": lambda number, rollouts: scores_of(reward.terms[number].reward, rollouts)})


_OPEN: Mapping[Role, Callable[[Mapping[str, Any]], AbstractContextManager[Served]]] = {
    "rank": open_rank,
    "sampler": _open_sampler,
    "scorer": _open_scorer,
}


@contextmanager
def connected(ray: ModuleType, config: DistributedConfig, bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Join the configured cluster, or start one with room for ``bundles``, unless the caller has joined one.

    Raises:
        ServiceError: There is no cluster at the address.
    """
    if ray.is_initialized():  # by the caller
        yield
        return
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    if address:
        settings |= {"address": address}
    else:  # a machine with fewer processors is oversubscribed
        processors = max(os.cpu_count() or 1, int(sum(bundle["CPU"] for bundle in bundles)))
        settings |= {"address": "local", "num_cpus": processors, "include_dashboard": False}
    try:
        with _own_sigterm():
            ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ServiceError(
            f"no Ray cluster: {error}",
            where=f"distributed.ray.address = {address!r}",
            fix="see `ray status` there; an empty address starts a cluster on this machine",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore this process's SIGTERM handler, which Ray replaces.

    Ray's handler ends the cluster's processes and then raises ``SystemExit`` anywhere in the main thread. A run that
    swallows it continues although it was cancelled.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
