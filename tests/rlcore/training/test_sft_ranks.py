"""Supervised fine-tuning on ranks takes the steps of one process, and a lost rank ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlcore.config import OptimConfig, PlacementConfig, SftConfig
from rlcore.demonstrations import Demonstration
from rlcore.errors import LearnerLostError
from rlcore.models.loading import load_policy
from rlcore.models.runtime import Runtime
from rlcore.models.sharded import Sharding, join, shard
from rlcore.packing import TokenSequence
from rlcore.ranks import ONE, Ranks, whole
from rlcore.training.rank_pool import RankPool
from rlcore.training.sft import SftLearner, teach
from rlcore.training.sft_ranks import SftGroup, SftPlan
from tests import strategies
from tests.ranks import Forks, on_ranks
from tests.rlcore.loop.conftest import start

__all__ = ["start"]  # a fixture
CPU = torch.device("cpu")
CONFIG = SftConfig(
    num_steps=3, batch_size=5, learning_rate=1e-2, tokens_per_microbatch=16, optim=OptimConfig(max_grad_norm=0.5)
)


def demonstrations(count: int, seed: int = 0) -> list[Demonstration]:
    """Of different lengths, each with a token that does not count."""
    draws = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = tuple(torch.randint(5, strategies.VOCABULARY, (3 + number % 5,), generator=draws).tolist())
        sequence = TokenSequence(prompt_ids=(1, ids[0]), completion_ids=ids[1:])
        found.append(Demonstration(sequence=sequence, loss_mask=(False, *(True,) * (len(ids) - 2))))
    return found


def taught(held: Literal["full", "replicate"]) -> Callable[[Ranks], tuple[list[Any], torch.Tensor]]:
    """Work for ranks: the reports of three steps, and the weights after them."""

    def work(ranks: Ranks) -> tuple[list[Any], torch.Tensor]:
        with strategies.double_precision():
            model = strategies.tiny_llama(dtype=torch.float64)
            if ranks.size > 1 and held == "full":
                shard(model, ranks, Sharding(), device=CPU)
            elif ranks.size > 1:
                join(model, ranks)
            reports: list[Any] = []
            learner, train = SftLearner(model, CONFIG), demonstrations(9)
            teach(learner, train, train[:4], CONFIG, seed=0, report=lambda _, metrics: reports.append(metrics))
            return reports, torch.cat([whole(p.detach()).flatten() for p in model.parameters()])

    return work


@pytest.mark.parametrize(
    ("held", "size"),
    [("full", 2), *(pytest.param(h, n, marks=pytest.mark.scale) for h, n in [("replicate", 2), ("full", 4)])],
)
def test_ranks_take_the_steps_of_one_process(held: Literal["full", "replicate"], size: int, tmp_path: Path) -> None:
    reports, weights = taught(held)(ONE)
    for their_reports, their_weights in on_ranks(size, taught(held), tmp_path):
        assert float((their_weights - weights).norm() / weights.norm()) < 1e-9
        for ours, theirs in zip(reports, their_reports, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-9)


def open_group(start: Path, config: SftConfig) -> tuple[SftGroup, Forks]:
    placement = PlacementConfig(backend="processes", learner_ranks=2, deadline_minutes=5.0)
    forks = Forks([CPU, CPU])
    plan = SftPlan(start=start, config=config, seed=0)
    runtime = Runtime(device=CPU, compute_dtype=torch.float32)
    return SftGroup(plan, placement, runtime, RankPool(forks, 300.0)), forks


def test_what_ranks_were_taught_is_saved_as_one_model(start: Path, tmp_path: Path) -> None:
    train, losses = demonstrations(9), dict[str, list[float]]()
    group, _ = open_group(start, CONFIG)
    with closing(group):
        one = SftLearner(load_policy(start, device=CPU, dtype=torch.float32), CONFIG)
        for name, learner in (("ranks", group), ("one", one)):
            losses[name] = []
            teach(learner, train, train, CONFIG, seed=0, report=lambda _, m, n=name: losses[n].append(m["sft/loss"]))
            learner.save_model(start, tmp_path / name)
    assert losses["ranks"] == pytest.approx(losses["one"], rel=1e-4)
    ours, theirs = (load_policy(tmp_path / name, device=CPU, dtype=torch.float32) for name in ("one", "ranks"))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-3, atol=1e-4)


def test_a_lost_rank_ends_it_and_is_named(start: Path) -> None:
    group, forks = open_group(start, CONFIG)
    with closing(group):
        os.kill(forks.processes[1].pid, signal.SIGKILL)
        with pytest.raises(LearnerLostError, match="rank 1 was ended by SIGKILL"):
            group.step(demonstrations(3))


def test_a_plan_arrives_as_it_was(start: Path) -> None:
    plan = SftPlan(start=start, config=CONFIG, seed=3)
    assert SftPlan.from_json(plan.to_json()) == plan
