"""A run on a real Ray cluster: what one process computes, and the same weights when its processes are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.distributed.cluster.remote import RemoteRanks
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.loop import Components, TrainResult, train
from rlcore.sampling.base import replicas_of
from tests.rlcore.distributed.cluster.placed import SETTINGS, placed_components, placement
from tests.rlcore.loop.conftest import MakeComponents, Tape

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]  # Ray's own are not ours to mend
TWO = placement(ranks=2, samplers=2, timeout_minutes=30.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # 15 otherwise: of a machine that has other work they would get nothing.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    yield
    ray.shutdown()


def process_id(process: Any) -> int:
    from ray._private import state

    found: int = state.actors(process._actor._actor_id.hex())["Pid"]
    return found


def a_sampler(components: Components) -> Any:
    sampler: Any = replicas_of(components.engine)[1]
    return sampler._process


def a_scorer(components: Components) -> Any:
    reward: Any = components.reward.terms[0].reward
    found = reward._free.get()
    reward._free.put(found)
    return found


def a_rank(components: Components) -> Any:
    assert isinstance(components.learner, DistributedLearner) and isinstance(
        components.learner.ranks.transport, RemoteRanks
    )
    return components.learner.ranks.transport.processes[1]


class Killer(Tape):
    """Kills a process when an iteration is recorded for the first time."""

    def __init__(self, components: Components, kills: Mapping[int, Callable[[Components], Any]]) -> None:
        super().__init__()
        self._components, self._kills = components, dict(kills)

    def metrics(self, iteration: int, metrics: Any) -> None:
        super().metrics(iteration, metrics)
        if iteration in self._kills:
            os.kill(process_id(self._kills.pop(iteration)(self._components)), signal.SIGKILL)


def asked(tape: Tape) -> list[tuple[int, Counter[str]]]:
    """Return the number of completions of each prompt every record of an iteration has, with the iteration's number."""
    counts = [
        Counter(each.rollout.prompt.prompt_id for group in drawn.groups for each in group) for drawn in tape.drawn
    ]
    return [(int(row["iteration"]), count) for row, count in zip(tape.rows, counts, strict=True)]


def trained(
    make_components: MakeComponents, start: Path, folder: str, kills: Mapping[int, Callable[[Components], Any]]
) -> tuple[dict[str, torch.Tensor], TrainResult, Killer]:
    notes: list[str] = []
    with placed_components(make_components(config=SETTINGS, folder=folder), start, TWO, notes.append) as components:
        tape = Killer(components, kills)
        outcome = train(components, tape)
        tape.notes += notes
        return {name: tensor.clone() for name, tensor in components.learner.weights().items()}, outcome, tape


def test_a_run_whose_processes_are_killed_ends_with_the_same_weights_and_every_prompt_once(
    make_components: MakeComponents, start: Path
) -> None:
    weights, _, tape = trained(make_components, start, "undisturbed", {})
    kills = {1: a_sampler, 2: a_scorer, 3: a_rank}
    found, outcome, disturbed = trained(make_components, start, "disturbed", kills)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    said = " ".join(disturbed.notes)
    assert "sampler 1 was replaced: reload policy_version=1" in said and "rank 1 is gone" in said
    expected = asked(tape)
    assert [iteration for iteration, _ in expected] == [1, 2, 3, 4]
    assert all(set(counts.values()) == {SETTINGS["group_size"]} for _, counts in expected)
    # The rank dies when the third iteration is recorded and not yet saved: it is done, and recorded, once more.
    assert asked(disturbed) == [*expected[:3], expected[2], expected[3]]
    assert len(outcome.history) == 4
