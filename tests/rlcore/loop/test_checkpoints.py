from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError
from rlcore.loop.checkpoints import Checkpoints
from rlcore.training.local_learner import LocalLearner
from tests.learners import make_learner as make

IDENTITY = {"stage": "k"}


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_learner(**settings: Any) -> LocalLearner:
    return LocalLearner(make(**settings))


def written(tmp_path: Path, seconds_per_iteration: float, **settings: Any) -> list[int]:
    """The iterations of 20 after which a checkpoint is written."""
    clock = Clock()
    learner = make_learner(num_iterations=20, checkpoints=CheckpointConfig(**settings))
    done = []
    with closing(Checkpoints(tmp_path, learner, identity=IDENTITY, clock=clock)) as checkpoints:
        for iteration in range(1, 21):
            clock.seconds += seconds_per_iteration
            if checkpoints.is_due(iteration):
                checkpoints.save(iteration, run_state={}, protected=[iteration])
                done.append(iteration)
    return done


@pytest.mark.parametrize(
    ("seconds", "settings", "expected"),
    [
        (1.0, {}, [1, 20]),
        (300.0, {}, [1, 4, 7, 10, 13, 16, 19, 20]),  # 15 minutes are three iterations
        (3600.0, {}, list(range(1, 21))),
        (30.0, {"every_minutes": 2.5}, [1, 6, 11, 16, 20]),
        (3600.0, {"every_iterations": 8}, [1, 8, 16, 20]),
        (1.0, {"every_iterations": 1}, list(range(1, 21))),
    ],
)
def test_by_the_clock_or_by_iterations_and_always_after_the_first_and_the_last(
    seconds: float, settings: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    assert written(tmp_path, seconds, **settings) == expected


def test_what_was_saved_last_is_loaded_and_another_run_may_not(tmp_path: Path) -> None:
    learner = make_learner(num_iterations=3)
    checkpoints = Checkpoints(tmp_path, learner, identity=IDENTITY)
    for iteration in (1, 2):
        checkpoints.save(iteration, run_state={"history": [iteration]}, protected=[1])
    state = checkpoints.load()  # waits for what is being written
    assert state is not None and (state["iteration"], state["history"]) == (2, [2])
    state = checkpoints.load(up_to=1)
    assert state is not None and state["iteration"] == 1
    with pytest.raises(CheckpointError, match="different stage"):
        Checkpoints(tmp_path, learner, identity={"stage": "other"}).load()
    checkpoints.close()
