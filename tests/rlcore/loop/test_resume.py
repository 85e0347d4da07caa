"""Checkpoints of a run: a killed, extended or rolled-back run ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.checks.health import HealthMonitor
from rlcore.config import (
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    HealthConfig,
    KlConfig,
    LimitConfig,
    OptimConfig,
    RewardTerm,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.errors import CheckpointError
from rlcore.loop import Components, HeldOut, TrainResult, open_run, train
from rlcore.loop import iteration as iteration_module
from rlcore.loop.native import native_components
from rlcore.loop.run import NAME, Checkpoints, History
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.rewards.user_function import function_reward
from rlcore.training.local_learner import LocalLearner
from rlcore.training.optim import parameters_of
from rlcore.types import Rollout
from tests import strategies
from tests.learners import make_learner
from tests.rlcore.loop.conftest import ANSWERS, QUESTIONS, KilledError, MakeComponents, Tape, prompts_of, weights

HALF_SOLVED = {question: ["right"] if number % 2 else ANSWERS for number, question in enumerate(QUESTIONS)}
TWICE = UpdateConfig(num_epochs=2, num_minibatches=2)
PATHS: dict[str, dict[str, Any]] = {
    "plain": {"update": TWICE, "kl": KlConfig(coefficient=0.1, target=0.5, horizon=20)},
    "far ahead": {"sampling": SamplingConfig(max_new_tokens=6, staleness=2)},
    "passing over": {"sampling": SamplingConfig(max_new_tokens=6, zero_signal_keep_prob=0.5)},
    "passing over, far ahead": {"sampling": SamplingConfig(max_new_tokens=6, zero_signal_keep_prob=0.5, staleness=2)},
    "dynamic": {"algorithm": "dapo", "sampling": SamplingConfig(max_new_tokens=6, dynamic_sampling_rounds=1)},
    "critic": {"algorithm": "ppo_penalty", "update": TWICE},
}


def without_costs(outcome: TrainResult) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if "second" not in name and "memory" not in name}
        for row in outcome.history
    ]


@pytest.mark.parametrize(
    ("path", "every"),
    [("plain", 1), ("far ahead", 1), ("passing over, far ahead", 2), ("dynamic", 2), ("critic", 2)],
)
def test_killed_run_resumes_bit_for_bit(path: str, every: int, make_components: MakeComponents) -> None:
    config = PATHS[path] | {"checkpoints": CheckpointConfig(every_iterations=every)}
    whole = make_components(config=config, script=HALF_SOLVED, folder="whole")
    expected = without_costs(train(whole, Tape()))
    for killed_in in (1, 2, 3, 4) if path == "plain" else (4,):
        folder = f"killed-{killed_in}"
        with pytest.raises(KilledError):
            train(make_components(config=config, script=HALF_SOLVED, folder=folder), Tape(killed_in=killed_in))
        again, tape = make_components(config=config, script=HALF_SOLVED, folder=folder), Tape()
        outcome = train(again, tape)
        assert torch.equal(weights(again), weights(whole))
        assert without_costs(outcome) == expected
        newest = max([n for n in range(1, killed_in) if n in (1, 4) or n % every == 0], default=0)
        assert [row["iteration"] for row in tape.rows] == list(range(newest + 1, 5))


def test_resumed_run_recomputes_health_findings(make_components: MakeComponents) -> None:
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
def test_interrupted_run_keeps_last_iteration(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch, place: str, kept: int
) -> None:
    config = PATHS["plain"] | {"checkpoints": CheckpointConfig()}  # by the clock: after the first iteration, then later
    whole = make_components(config=config, script=HALF_SOLVED, folder="whole")
    expected = without_costs(train(whole, Tape()))
    original, calls = getattr(iteration_module, place), count(1)

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(iteration_module, place, interrupted)
        train(make_components(config=config, script=HALF_SOLVED), Tape())
    again, tape = make_components(config=config, script=HALF_SOLVED), Tape()
    assert without_costs(train(again, tape)) == expected
    assert torch.equal(weights(again), weights(whole))
    assert [row["iteration"] for row in tape.rows] == list(range(kept + 1, 5))


def test_finished_run_does_nothing_again(make_components: MakeComponents) -> None:
    first = make_components()
    expected, tape = train(first, Tape()), Tape()
    again = make_components()
    assert train(again, tape) == expected
    assert tape.rows == []
    assert torch.equal(weights(first), weights(again))


def test_recorder_is_flushed_before_checkpoints(make_components: MakeComponents, tmp_path: Path) -> None:
    tape = Tape()
    train(make_components(config={"checkpoints": CheckpointConfig(every_iterations=2)}), tape)
    assert tape.num_flushes == 3  # after the first, the second and the fourth
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [NAME, "step-000002", "step-000004"]


def test_checkpoint_of_other_run_is_refused(make_components: MakeComponents) -> None:
    train(make_components(config={"num_iterations": 1}), Tape())
    with pytest.raises(CheckpointError, match="reward"):
        train(make_components(config={"num_iterations": 1}, identity={"reward": "other"}), Tape())


EVERY = {"checkpoints": CheckpointConfig(every_iterations=1)}


def optimizer_state(components: Components) -> list[torch.Tensor]:
    learning = [(each, key) for each in components.learner.learner.optimizers for key in parameters_of(each)]
    return [torch.as_tensor(value) for each, key in learning for _, value in sorted(each.state[key].items())]


def is_same(one: Components, other: Components) -> bool:
    pairs = zip(optimizer_state(one), optimizer_state(other), strict=True)
    return torch.equal(weights(one), weights(other)) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("path", ["plain", "passing over", "critic"])
def test_extended_run_equals_longer_run(path: str, make_components: MakeComponents) -> None:
    short = PATHS[path] | EVERY | {"num_iterations": 3}
    long, script = short | {"num_iterations": 5}, {"script": HALF_SOLVED, "health": HealthConfig(action="warn")}
    whole = make_components(config=long, folder="whole", **script)
    expected = without_costs(train(whole, Tape()))
    train(make_components(config=short, folder="finished", **script), Tape())
    with pytest.raises(KilledError):
        train(make_components(config=short, folder="killed", **script), Tape(killed_in=3))
    for folder, done in (("finished", 3), ("killed", 2)):
        again, tape = make_components(config=long, folder=folder, **script), Tape()
        assert without_costs(train(again, tape)) == expected
        assert is_same(again, whole)
        assert [row["iteration"] for row in tape.rows] == list(range(done + 1, 6))


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"update": UpdateConfig(optim=OptimConfig(schedule="cosine"))}, "update.optim.schedule = 'cosine'"),
        ({"critic": CriticConfig(optim=OptimConfig(schedule="linear"))}, "critic.optim.schedule = 'linear'"),
        ({"sampling": SamplingConfig(max_new_tokens=6, staleness=1)}, "sampling.staleness = 1"),
    ],
)
def test_run_bound_to_length_is_not_extended(
    bound: dict[str, Any], reason: str, make_components: MakeComponents
) -> None:
    first = make_components(config=bound | {"num_iterations": 1})
    assert first.config.bound_to_length.startswith(reason)
    train(first, Tape())
    with pytest.raises(CheckpointError, match=r"different num_iterations \(1 -> 2\)"):
        train(make_components(config=bound | {"num_iterations": 2}), Tape())


def test_shorter_run_needs_checkpoint_of_its_length(make_components: MakeComponents) -> None:
    expected = train(make_components(config=EVERY), Tape())
    taken = make_components(config=EVERY | {"num_iterations": 3})
    assert train(taken, Tape()).history == expected.history[:3]
    with pytest.raises(CheckpointError, match=r"4 iterations are done, num_iterations = 2, .* exactly 2 is kept"):
        train(make_components(config=EVERY | {"num_iterations": 2}), Tape())
    assert train(make_components(config=EVERY), Tape()) == expected


def test_refusal_names_all_different_settings(make_components: MakeComponents) -> None:
    train(make_components(), Tape())
    changed = {"learning_rate": 0.25, "sampling": SamplingConfig(max_new_tokens=7)}
    words = r"different learning_rate \(.* -> 0.25\), sampling.max_new_tokens \(6 -> 7\)\n.*remove .*/run to restart"
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        train(make_components(config=changed), Tape())


def lengths(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    """A reward that differs within groups of random completions."""
    return [float(sum(rollout.completion_ids) % 5) for rollout in rollouts]


def sampled_run(
    start: Path, folder: Path, config: Mapping[str, Any], *, num_problems: int = 2, **changes: Any
) -> Components:
    required = {"prompts_per_iteration": 2, "num_iterations": 3, "sampling": SamplingConfig(max_new_tokens=6)}
    kl = {"kl": KlConfig(coefficient=0.1, target=0.5, horizon=20)}
    components = native_components(
        start,
        strategies.rl_config(**required | EVERY | kl | config),
        prompts=prompts_of(start)[:4],
        reward=function_reward(lengths),
        folder=folder,
    )
    verifier = build_rewards((RewardTerm(kind="math"),), resources=RewardResources())
    held_out = HeldOut(prompts=prompts_of(start)[4 : 4 + num_problems], verifier=verifier)
    return replace(components, held_out=held_out, **changes)


ALWAYS_AUDITED = HealthConfig(audit=AuditConfig(max_time_fraction=1.0, rollouts=6))
WATCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "much": ({"eval_every": 1, "checkpoints": CheckpointConfig()}, {"num_problems": 1, "health": ALWAYS_AUDITED}),
    "not at all": ({}, {"health": HealthConfig(action="off", audit=AuditConfig(action="off"))}),
}


@pytest.mark.parametrize("name", WATCHED)
def test_observers_change_no_bit_and_may_change_at_resume(name: str, start: Path, tmp_path: Path) -> None:
    (config, changes), plain = WATCHED[name], sampled_run(start, tmp_path / "plain", {})
    outcome = train(plain, Tape())
    assert any(row["gradient_norm"] > 0.0 for row in outcome.history)
    watched = sampled_run(start, tmp_path / "watched", config, **changes)
    train(watched, Tape())
    assert is_same(watched, plain)
    with pytest.raises(KilledError):
        train(sampled_run(start, tmp_path / "resumed", {}), Tape(killed_in=2))
    with pytest.raises(KilledError):
        train(sampled_run(start, tmp_path / "resumed", config, **changes), Tape(killed_in=3))
    again = sampled_run(start, tmp_path / "resumed", {})
    assert without_evaluation(train(again, Tape())) == without_evaluation(outcome)
    assert is_same(again, plain)


def without_evaluation(outcome: TrainResult) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if "eval/" not in key} for row in without_costs(outcome)]


def with_rows(folder: Path, count: int) -> History:
    history = History(folder)
    for iteration in range(1, count + 1):
        history.append({"iteration": iteration, "reward/mean": 1.0 / iteration, f"odd/{iteration % 2}": 3})
    return history


def test_history_round_trip(tmp_path: Path) -> None:
    history = with_rows(tmp_path, 5)
    assert history[1] == {"iteration": 2, "reward/mean": 0.5, "odd/0": 3.0}
    assert [row["iteration"] for row in history[1:-1]] == [2, 3, 4]
    again = History(tmp_path)
    again.restore(history.seal())
    assert json.dumps(list(again)) == json.dumps(list(history))
    for rows in (history, again):  # names of their own would be most of a long history's memory
        assert all(one is other for one, other in zip(rows[0], rows[2], strict=True))
    assert history.has("odd/1") and not history.has("odd/2")


def test_rows_after_seal_are_dropped(tmp_path: Path) -> None:
    history = with_rows(tmp_path, 3)
    sealed = history.seal()
    history.append({"iteration": 4, "later": 1.0})
    history.seal()
    history.restore(sealed)
    assert len(history) == 3 and not history.has("later")
    history.restore({})
    assert list(history) == []


def test_checkpoint_size_is_constant(make_components: MakeComponents, tmp_path: Path) -> None:
    sizes = {}
    for iterations in (2, 6):
        train(make_components(config={"num_iterations": iterations}, folder=f"run-{iterations}"), Tape())
        newest = max((tmp_path / f"run-{iterations}").glob("step-*"))
        sizes[iterations] = sum(path.stat().st_size for path in newest.iterdir())
        assert len((tmp_path / f"run-{iterations}" / NAME).read_text().splitlines()) == iterations
    assert abs(sizes[6] - sizes[2]) < 600  # the audit's window of 64 updates fills up


def test_changed_history_falls_back_to_matching_checkpoint(make_components: MakeComponents, tmp_path: Path) -> None:
    whole = train(make_components(folder="whole"), Tape())
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=4))
    path = tmp_path / "run" / NAME
    path.write_bytes(path.read_bytes()[:-5])  # within the row of iteration 3
    tape = Tape()
    outcome = train(make_components(), tape)
    assert [row["iteration"] for row in tape.rows] == [3, 4]
    assert [row["reward/mean"] for row in outcome.history] == [row["reward/mean"] for row in whole.history]
    assert (tmp_path / "run" / "damaged-step-000003").is_dir()


def test_lost_history_is_an_error(make_components: MakeComponents, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=4))
    (tmp_path / "run" / NAME).unlink()
    with pytest.raises(CheckpointError, match="checkpoints are damaged"):
        train(make_components(), Tape())


class Counted(list[dict[str, float]]):
    """A history that counts how often a row is read."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def,override]
        self.reads += 1
        return super().__getitem__(place)


def test_health_reads_constant_number_of_rows() -> None:
    judge, history, reads = HealthMonitor(HealthConfig()), Counted(), []
    for iteration in range(1, 101):
        history.append({"iteration": iteration, "kl/ref": 0.1, "entropy": 1e-9, "eval/accuracy": 0.5})
        before = history.reads
        judge.update(history)
        reads.append(history.reads - before)
    assert max(reads[10:]) == reads[10] < 40


def written(tmp_path: Path, seconds_per_iteration: float, **settings: Any) -> list[int]:
    """The iterations of 20 after which a checkpoint is written."""
    now = [0.0]
    learner = LocalLearner(make_learner(num_iterations=20, checkpoints=CheckpointConfig(**settings)))
    done = []
    with closing(Checkpoints(tmp_path, learner, identity={}, clock=lambda: now[0])) as checkpoints:
        for iteration in range(1, 21):
            now[0] += seconds_per_iteration
            if checkpoints.is_due(iteration):
                checkpoints.save(iteration, run_state={}, protected=[iteration])
                done.append(iteration)
    return done


def test_a_checkpoint_that_is_being_written_is_loaded(tmp_path: Path) -> None:
    learner = LocalLearner(make_learner(num_iterations=3))
    with closing(Checkpoints(tmp_path, learner, identity={})) as checkpoints:
        for iteration in (1, 2):
            checkpoints.save(iteration, run_state={"history": [iteration]}, protected=[1])
        for up_to, expected in ((None, 2), (1, 1)):
            state = checkpoints.load(up_to=up_to)
            assert state is not None and (state["iteration"], state["history"]) == (expected, [expected])


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
def test_checkpoint_schedule(seconds: float, settings: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert written(tmp_path, seconds, **settings) == expected
