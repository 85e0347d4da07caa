"""Ranks of a stage in which nothing but the learner is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from rlcore.choices import choices
from rlcore.config import PlacementConfig
from rlcore.distributed.cluster.ray_cluster import open_cluster
from rlcore.distributed.cluster.remote_ranks import cluster_ranks
from rlcore.distributed.local_ranks import child_ranks
from rlcore.distributed.rank_pool import RankPool
from rlcore.hardware.runtime import Runtime


@contextmanager
def open_ranks_alone(placement: PlacementConfig, runtime: Runtime, note: Callable[[str], None]) -> Iterator[RankPool]:
    """Who starts the ranks: this process, or a cluster that has room for them and for nothing else of the run.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or Ray is not installed.
        ServiceError: there is no cluster, or it has no room.
    """
    with RANKS[placement.backend](placement, runtime, note) as ranks:
        yield ranks


@contextmanager
def _children(placement: PlacementConfig, runtime: Runtime, note: Callable[[str], None]) -> Iterator[RankPool]:
    yield child_ranks(placement, runtime.device)


@contextmanager
def _of_a_cluster(placement: PlacementConfig, runtime: Runtime, note: Callable[[str], None]) -> Iterator[RankPool]:
    alone = replace(placement, ray=replace(placement.ray, samplers=0, scorers=0))
    with open_cluster(alone, gpus=runtime.device.type == "cuda", note=note) as cluster:
        yield cluster_ranks(cluster, runtime.device)


_Open = Callable[[PlacementConfig, Runtime, Callable[[str], None]], AbstractContextManager[RankPool]]
RANKS: Mapping[str, _Open] = choices("placement.backend", {"processes": _children, "ray": _of_a_cluster})
