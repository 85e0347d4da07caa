"""A run that was killed ends with the weights of one that was not, wherever it was killed."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import CheckpointConfig, HealthConfig, KlConfig, LimitConfig, SamplingConfig, UpdateConfig
from rlcore.errors import CheckpointError
from rlcore.loop import TrainResult, iteration, open_run, train
from rlcore.loop.history import NAME
from tests.rlcore.loop.conftest import ANSWERS, QUESTIONS, KilledError, MakeComponents, Tape, weights

HALF_SOLVED = {question: ["right"] if number % 2 else ANSWERS for number, question in enumerate(QUESTIONS)}
TWICE = UpdateConfig(num_epochs=2, num_minibatches=2)
PATHS: dict[str, dict[str, Any]] = {
    "plain": {"update": TWICE, "kl": KlConfig(coefficient=0.1, target=0.5, horizon=20)},
    "ahead": {"sampling": SamplingConfig(max_new_tokens=6, staleness=1)},
    "far ahead": {"sampling": SamplingConfig(max_new_tokens=6, staleness=2)},
    "passing over": {"sampling": SamplingConfig(max_new_tokens=6, zero_signal_keep_prob=0.5)},
    "passing over, far ahead": {"sampling": SamplingConfig(max_new_tokens=6, zero_signal_keep_prob=0.5, staleness=2)},
    "dynamic": {"algorithm": "dapo", "sampling": SamplingConfig(max_new_tokens=6, dynamic_sampling_rounds=1)},
    "critic": {"algorithm": "ppo_penalty", "update": TWICE},
}


def without_costs(outcome: TrainResult) -> list[dict[str, float]]:
    """The history without wall times and bytes."""
    return [
        {name: value for name, value in row.items() if "second" not in name and "memory" not in name}
        for row in outcome.history
    ]


@pytest.mark.parametrize(
    ("path", "every"),
    [
        ("plain", 1),
        ("ahead", 2),
        ("far ahead", 1),
        ("passing over", 2),
        ("passing over, far ahead", 2),
        ("dynamic", 2),
        ("critic", 2),
    ],
)
def test_resumed_after_a_kill_in_any_iteration_a_run_ends_with_the_same_bits(
    path: str, every: int, make_components: MakeComponents
) -> None:
    config = PATHS[path] | {"checkpoints": CheckpointConfig(every_iterations=every)}
    whole = make_components(config=config, script=HALF_SOLVED, folder="whole")
    expected = without_costs(train(whole, Tape()))
    for killed_in in (1, 2, 3, 4) if path == "plain" else (2, 4):
        folder = f"killed-{killed_in}"
        with pytest.raises(KilledError):
            train(make_components(config=config, script=HALF_SOLVED, folder=folder), Tape(killed_in=killed_in))
        again, tape = make_components(config=config, script=HALF_SOLVED, folder=folder), Tape()
        outcome = train(again, tape)
        assert torch.equal(weights(again), weights(whole))
        assert without_costs(outcome) == expected
        newest = max([n for n in range(1, killed_in) if n in (1, 4) or n % every == 0], default=0)
        assert [row["iteration"] for row in tape.rows] == list(range(newest + 1, 5))


def test_a_resumed_run_finds_again_what_the_health_rules_had_found_which_no_checkpoint_keeps(
    make_components: MakeComponents,
) -> None:
    free = make_components(config=PATHS["plain"], script=HALF_SOLVED, folder="free")
    readings = sorted(row["kl/ref"] for row in train(free, Tape()).history)
    warns = HealthConfig(action="warn", kl=LimitConfig(warn=sum(readings[1:3]) / 2.0, stop=99.0))
    config = PATHS["plain"] | {"checkpoints": CheckpointConfig(every_iterations=1)}
    expected = train(make_components(config=config, script=HALF_SOLVED, folder="whole", health=warns), Tape()).findings
    assert expected
    with pytest.raises(KilledError):
        train(make_components(config=config, script=HALF_SOLVED, health=warns), Tape(killed_in=4))
    with open_run(make_components(config=config, script=HALF_SOLVED, health=warns), Tape()) as run:
        assert run.iterations_done == 3
        assert run.findings == [dict(each) for each in expected if each["iteration"] <= 3]
        assert "findings" not in run.state()


@pytest.mark.parametrize(("place", "kept"), [("collect_groups", 3), ("update_policy", 1)])
def test_an_interrupted_run_keeps_its_last_iteration_unless_the_learner_was_changing(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch, place: str, kept: int
) -> None:
    config = PATHS["plain"] | {"checkpoints": CheckpointConfig()}  # by the clock: after the first iteration, then later
    whole = make_components(config=config, script=HALF_SOLVED, folder="whole")
    expected = without_costs(train(whole, Tape()))
    original, calls = getattr(iteration, place), count(1)

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(iteration, place, interrupted)
        train(make_components(config=config, script=HALF_SOLVED), Tape())
    again, tape = make_components(config=config, script=HALF_SOLVED), Tape()
    assert without_costs(train(again, tape)) == expected
    assert torch.equal(weights(again), weights(whole))
    assert [row["iteration"] for row in tape.rows] == list(range(kept + 1, 5))


def test_a_run_that_is_done_does_nothing_when_it_is_started_again(make_components: MakeComponents) -> None:
    first = make_components()
    expected, tape = train(first, Tape()), Tape()
    again = make_components()
    assert train(again, tape) == expected
    assert tape.rows == []
    assert torch.equal(weights(first), weights(again))


def test_what_was_recorded_is_flushed_before_every_checkpoint(make_components: MakeComponents, tmp_path: Path) -> None:
    tape = Tape()
    train(make_components(config={"checkpoints": CheckpointConfig(every_iterations=2)}), tape)
    assert tape.num_flushes == 3  # after the first, the second and the fourth
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [NAME, "step-000002", "step-000004"]


def test_a_checkpoint_of_another_run_is_refused(make_components: MakeComponents) -> None:
    train(make_components(config={"num_iterations": 1}), Tape())
    with pytest.raises(CheckpointError, match="reward"):
        train(make_components(config={"num_iterations": 1}, identity={"reward": "other"}), Tape())
