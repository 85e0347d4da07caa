"""Processes on a Ray cluster: Ray finds a place for each, restarts it when it died, and says when it is gone for good.

Nothing else imports Ray, and nothing imports it before a run asks for a cluster. What crosses over is bytes of our own
(:mod:`rlcore.distributed.serialization`), and weights as a safetensors file, which each machine fetches once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from rlcore.config.placement import PlacementConfig
from rlcore.distributed.cluster.connection import connected
from rlcore.distributed.cluster.host import Host, Role
from rlcore.distributed.serialization import decode, decode_error, encode, is_error
from rlcore.errors import ConfigError, RlcoreError, ServiceError

_WAIT_SECONDS = 10.0  # between two looks at a cluster that has no room yet


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Bytes that lie on the cluster."""

    reference: Any


@dataclass(frozen=True, slots=True)
class Pending:
    """An answer that is on its way."""

    ray: ModuleType
    reference: Any

    def data(self) -> Any:
        """The answer, waited for; None where the process died."""
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayActorError:
            return None


class RemoteProcess:
    """One process of a cluster, called ``name``, in which a :class:`~rlcore.distributed.cluster.host.Host` answers."""

    def __init__(self, cluster: Cluster, actor: Any, name: str, lost: type[RlcoreError]) -> None:
        self.name = name
        self._cluster, self._actor, self._lost = cluster, actor, lost

    def begin(self, method: str, *arguments: Any) -> Pending:
        """Ask the host itself to do something."""
        return Pending(self._cluster.ray, getattr(self._actor, method).remote(*arguments))

    def ask(self, method: str, *arguments: Any, weights: RemoteBytes | None = None, **settings: Any) -> dict[str, Any]:
        """The answer of what is hosted, from whichever process stands in its place by then.

        One that dies is started anew by Ray, which asks it once more. One that is silent for too long is taken to be
        dead.

        Raises:
            RlcoreError: what was raised there; or the process died more often than it may.
        """
        sent = (encode((method, arguments, settings)), *([weights.reference] if weights else []))
        answer: dict[str, Any] = decode(self._wait(self._actor.ask.remote(*sent), method))
        if "error" in answer:
            raise decode_error(answer)
        if is_error(answer):
            raise self._gone(f"failed in {method!r}: {answer.get('crash') or answer['memory']}")
        return answer

    def keep(self) -> RemoteBytes:
        """What the process has exported, left where it is."""
        return RemoteBytes(self._actor.take.remote())

    def reason(self) -> str:
        """Why the process is gone, in Ray's words."""
        errors = self._cluster.ray.exceptions
        try:
            self._cluster.ray.get(self._actor.address.remote(), timeout=_WAIT_SECONDS)
        except errors.RayActorError as error:
            return _short(error)
        except errors.GetTimeoutError:
            pass
        return "Ray does not say why"

    def end(self) -> None:
        """Kill it; Ray starts no other."""
        self._cluster.ray.kill(self._actor)

    def _wait(self, reference: Any, method: str) -> bytes:
        ray, seconds = self._cluster.ray, self._cluster.seconds
        while True:
            try:
                found: bytes = ray.get(reference, timeout=seconds)
                return found
            except ray.exceptions.GetTimeoutError:
                self._cluster.log(f"{self.name} did not answer within {seconds / 60.0:g} minutes: it is replaced")
                ray.kill(self._actor, no_restart=False)
            except ray.exceptions.RayError as error:
                raise self._gone(f"is gone, in {method!r}: {_short(error)}") from None

    def _gone(self, how: str) -> RlcoreError:
        return self._lost(f"{self.name} {how}", where="distributed", fix=self._cluster.advice)


class Cluster:
    """A cluster with room for every process of a run. ``log`` shows a sentence to people.

    ``seconds``: how long a process may take for an answer.
    """

    def __init__(self, ray: ModuleType, placement: PlacementConfig, group: Any, *, log: Callable[[str], None]) -> None:
        self.ray, self.placement, self.log = ray, placement, log
        self.seconds = 60.0 * placement.timeout_minutes
        self._group = group

    @property
    def advice(self) -> str:
        """Where to look, and what to do."""
        logs = self.ray.get_runtime_context().get_session_name()
        return f"Ray's logs of {logs} (/tmp/ray) say more; the same command goes on from the newest checkpoint"

    def launch(
        self, role: Role, number: int, *, setup: Mapping[str, Any] | None = None, restarts: int, lost: type[RlcoreError]
    ) -> RemoteProcess:
        """Process ``number`` of a role in the room that was kept for it; with a ``setup``, Ray may start it anew.

        ``lost``: what is raised when it is gone for good.
        """
        place, gpus = sum(_counts(self.placement)[: _ROLES.index(role)]) + number, self._group.bundle_specs
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place
        )
        kind = self.ray.remote(_ACTORS[role]).options(
            num_cpus=self.placement.ray.cpus,
            num_gpus=gpus[place].get("GPU", 0),
            max_restarts=restarts,
            max_task_retries=-1 if restarts else 0,
            scheduling_strategy=strategy,
        )
        actor = kind.remote(role, encode(setup) if setup is not None else b"")
        return RemoteProcess(self, actor, f"{role} {number}", lost)

    def first_of(self, pending: Sequence[Pending], seconds: float) -> list[int]:
        """The places of those that are there, after waiting for one of them."""
        references = [each.reference for each in pending]
        ready, _ = self.ray.wait(references, num_returns=1, timeout=seconds)
        return [references.index(each) for each in ready]

    def fetch(self, blob: RemoteBytes) -> bytes:
        """The bytes of a blob."""
        found: bytes = self.ray.get(blob.reference)
        return found


_ROLES: tuple[Role, ...] = ("rank", "sampler", "scorer")


@contextmanager
def open_cluster(placement: PlacementConfig, *, gpus: bool, log: Callable[[str], None]) -> Iterator[Cluster]:
    """A cluster with room for the processes of ``placement``, all of which end on the way out.

    ``gpus``: each rank and each sampler has one.

    Raises:
        ConfigError: Ray is not installed.
        ServiceError: there is no cluster at the address, or it has no room within the deadline.
    """
    ray = _import_ray()
    bundles = _bundles(placement, gpus=gpus)
    with connected(ray, placement, bundles):
        group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            _wait_for_room(ray, group, bundles, placement, log)
            yield Cluster(ray, placement, group, log=log)
        finally:
            ray.util.remove_placement_group(group)  # ends what runs in it


def _import_ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tells nobody outside
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "distributed.backend = 'ray' needs Ray, which is not installed",
            where="distributed.backend",
            fix="pip install 'rlcore[ray]'; or set it to 'processes' for the ranks of one machine",
        ) from error
    module: ModuleType = ray
    return module


def _wait_for_room(
    ray: ModuleType,
    group: Any,
    bundles: Sequence[Mapping[str, float]],
    placement: PlacementConfig,
    log: Callable[[str], None],
) -> None:
    """Return when Ray has kept room for every process; a cluster that grows may take its time."""
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    left = 60.0 * placement.timeout_minutes
    while not group.wait(min(_WAIT_SECONDS, left)):
        there = ray.cluster_resources()
        has = ", ".join(f"{there.get(kind, 0.0):g} of {count:g} {kind}s" for kind, count in wanted.items() if count)
        left -= _WAIT_SECONDS
        if left <= 0.0:
            raise ServiceError(
                f"the Ray cluster has no room for the run within {placement.timeout_minutes:g} minutes: it has {has}",
                where="distributed",
                fix="add machines, lower learner_ranks, ray.num_rollout_workers, ray.num_reward_workers or ray.cpus; "
                "`ray status` says more",
            )
        log(f"waits for room on the Ray cluster: it has {has}")


def _bundles(placement: PlacementConfig, *, gpus: bool) -> list[dict[str, float]]:
    """What each process needs, ranks first: together they are placed, or none of them."""
    ray = placement.ray
    own = [1.0 if gpus else 0.0, 1.0 if gpus else 0.0, ray.reward_worker_gpus]
    return [
        {"CPU": float(ray.cpus)} | ({"GPU": share} if share else {})
        for share, count in zip(own, _counts(placement), strict=True)
        for _ in range(count)
    ]


def _counts(placement: PlacementConfig) -> tuple[int, int, int]:
    """How many processes each role has."""
    return placement.learner_ranks, placement.ray.num_rollout_workers, placement.ray.num_reward_workers


def _short(error: Exception) -> str:
    """What an error of Ray's says beyond the actor's numbers, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor ")][-1:] or lines[:1]
    return " ".join(causes)[:300]


class _Actor(Host):
    """A host that says where it is."""

    def address(self) -> str:
        """An address and a free port of this machine, as the cluster reaches it."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"


class Rank(_Actor):
    """A rank under this name in Ray's lists and in the machine's: ``ray::Rank``."""


class Sampler(_Actor):
    """A sampler, likewise."""


class Scorer(_Actor):
    """A scorer, likewise."""


_ACTORS: Mapping[Role, type[_Actor]] = MappingProxyType({"rank": Rank, "sampler": Sampler, "scorer": Scorer})
