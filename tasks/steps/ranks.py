"""Learner of a supervised stage, its only component, and the report of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlcore.choices import choices
from rlcore.config import DistributedConfig
from rlcore.distributed.build_supervised import SupervisedPlan
from rlcore.distributed.cluster.ray_cluster import open_cluster
from rlcore.distributed.cluster.remote import cluster_ranks
from rlcore.distributed.distributed_learner import DistributedSupervised
from rlcore.distributed.local_ranks import child_ranks
from rlcore.distributed.rank_pool import RankPool
from rlcore.models.runtime import Runtime
from rlcore.tasks.steps.base import StageContext

Handle = TypeVar("Handle")


@contextmanager
def open_supervised(
    context: StageContext,
    checkpoint: Path,
    runtime: Runtime,
    *,
    here: Callable[[], Handle],
) -> Iterator[Handle]:
    """Open the learner of a supervised stage: a model of this process, or ranks if the preset is distributed.

    ``here`` makes the learner of this process; ranks are child processes, or on a cluster with room for them.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or Ray is not installed.
        ModelError: the checkpoint cannot be trained.
        ServiceError: there is no cluster, or it has no room.
    """
    placement = context.config.distributed
    if not placement.is_shared:
        yield here()
        return
    with RANKS[placement.backend](context, checkpoint, runtime) as group:
        yield group


def _children(context: StageContext, checkpoint: Path, runtime: Runtime) -> AbstractContextManager[Any]:
    return _group(context, checkpoint, runtime, child_ranks(context.config.distributed, runtime.device))


@contextmanager
def _of_a_cluster(context: StageContext, checkpoint: Path, runtime: Runtime) -> Iterator[Any]:
    placement: DistributedConfig = context.config.distributed
    alone = replace(placement, ray=replace(placement.ray, num_rollout_workers=0, num_reward_workers=0))
    with (
        open_cluster(alone, gpus=runtime.device.type == "cuda", log=context.log) as cluster,
        _group(context, checkpoint, runtime, cluster_ranks(cluster, runtime.device)) as group,
    ):
        yield group


def _group(context: StageContext, checkpoint: Path, runtime: Runtime, ranks: RankPool) -> AbstractContextManager[Any]:
    plan = SupervisedPlan(start=checkpoint, config=context.config.stage.settings, seed=context.seed)
    return closing(DistributedSupervised(plan, context.config.distributed, runtime, ranks))


RANKS: Mapping[str, Callable[..., AbstractContextManager[Any]]] = choices(
    "distributed.backend", {"processes": _children, "ray": _of_a_cluster}
)


def step_reporter(
    context: StageContext, history: list[Mapping[str, float]], name: str, *, num_steps: int
) -> Callable[[int, Mapping[str, float]], None]:
    """Return a reporter of steps to ``history``, MLflow and the log; ``name`` begins its metrics: ``sft/loss``.

    It counts the steps itself, so that the curves of an ensemble's members follow one another.
    """

    def report(_: int, metrics: Mapping[str, float]) -> None:
        step = len(history) + 1
        history.append({"iteration": step, **metrics})
        context.tracker.log_metrics(metrics, step=step)
        if step % max(1, num_steps // 10) == 0 or step == num_steps:
            found = [
                f"{key}={metrics[f'{name}/{key}']:.3f}" for key in ("loss", "accuracy") if f"{name}/{key}" in metrics
            ]
            context.log(f"step {step}/{num_steps} {' '.join(found)}")

    return report
