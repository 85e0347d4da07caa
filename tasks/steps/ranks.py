"""Ranks of a stage in which nothing but the learner is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

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
    if placement.backend != "ray":
        yield child_ranks(placement, runtime.device)
        return
    alone = replace(placement, ray=replace(placement.ray, samplers=0, scorers=0))
    with open_cluster(alone, gpus=runtime.device.type == "cuda", note=note) as cluster:
        yield cluster_ranks(cluster, runtime.device)
