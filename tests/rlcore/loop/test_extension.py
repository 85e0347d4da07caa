"""More iterations extend a run, bit for bit as if they had been asked for at once; what only watches changes no bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import (
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    HealthConfig,
    KlConfig,
    OptimConfig,
    RewardTerm,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.errors import CheckpointError
from rlcore.loop import Components, HeldOut, TrainResult, train
from rlcore.loop.native import chat_prompts, native_components
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.rewards.user_function import function_reward
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.optim import parameters_of
from rlcore.types import Rollout
from tests import strategies
from tests.rlcore.loop.conftest import QUESTIONS, KilledError, MakeComponents, Tape, weights
from tests.rlcore.loop.test_resume import HALF_SOLVED, PATHS, without_costs

EVERY = {"checkpoints": CheckpointConfig(every_iterations=1)}


def optimizer_state(components: Components) -> list[torch.Tensor]:
    """All numbers of the optimizers: moments and steps."""
    learning = [(each, key) for each in components.learner.learner.optimizers for key in parameters_of(each)]
    return [torch.as_tensor(value) for each, key in learning for _, value in sorted(each.state[key].items())]


def is_same(one: Components, other: Components) -> bool:
    """Return True if weights and optimizers agree in every bit."""
    pairs = zip(optimizer_state(one), optimizer_state(other), strict=True)
    return torch.equal(weights(one), weights(other)) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("path", ["plain", "passing over", "dynamic", "critic"])
def test_a_longer_run_continues_a_finished_or_killed_one_with_the_bits_of_one_asked_for_at_once(
    path: str, make_components: MakeComponents
) -> None:
    short = PATHS[path] | EVERY | {"num_iterations": 4}
    long, script = short | {"num_iterations": 8}, {"script": HALF_SOLVED, "health": HealthConfig(action="warn")}
    whole = make_components(config=long, folder="whole", **script)
    expected = without_costs(train(whole, Tape()))
    train(make_components(config=short, folder="finished", **script), Tape())
    with pytest.raises(KilledError):
        train(make_components(config=short, folder="killed", **script), Tape(killed_in=4))
    for folder, done in (("finished", 4), ("killed", 3)):
        again, tape = make_components(config=long, folder=folder, **script), Tape()
        assert without_costs(train(again, tape)) == expected
        assert is_same(again, whole)
        assert [row["iteration"] for row in tape.rows] == list(range(done + 1, 9))


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"update": UpdateConfig(optim=OptimConfig(schedule="cosine"))}, "update.optim.schedule = 'cosine'"),
        ({"critic": CriticConfig(optim=OptimConfig(schedule="linear"))}, "critic.optim.schedule = 'linear'"),
        ({"sampling": SamplingConfig(max_new_tokens=6, staleness=1)}, "sampling.staleness = 1"),
    ],
)
def test_what_depends_on_the_length_says_so_and_is_not_extended(
    bound: dict[str, Any], reason: str, make_components: MakeComponents
) -> None:
    first = make_components(config=bound | {"num_iterations": 1})
    assert first.config.bound_to_length.startswith(reason)
    train(first, Tape())
    with pytest.raises(CheckpointError, match=r"different num_iterations \(1 -> 2\)"):
        train(make_components(config=bound | {"num_iterations": 2}), Tape())


def test_a_shorter_run_takes_the_checkpoint_of_exactly_its_length_and_otherwise_is_refused(
    make_components: MakeComponents,
) -> None:
    expected = train(make_components(config=EVERY), Tape())
    taken = make_components(config=EVERY | {"num_iterations": 3})
    assert train(taken, Tape()).history == expected.history[:3]
    with pytest.raises(CheckpointError, match=r"4 iterations are done, num_iterations = 2, .* exactly 2 is kept"):
        train(make_components(config=EVERY | {"num_iterations": 2}), Tape())
    assert train(make_components(config=EVERY), Tape()) == expected


def test_a_refusal_names_every_setting_that_differs_with_both_values(make_components: MakeComponents) -> None:
    train(make_components(), Tape())
    changed = {"learning_rate": 0.25, "sampling": SamplingConfig(max_new_tokens=7)}
    words = r"different learning_rate \(.* -> 0.25\), sampling.max_new_tokens \(6 -> 7\)\n.*remove .*/run to restart"
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        train(make_components(config=changed), Tape())


def lengths(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    """A reward that differs within groups of random completions."""
    return [float(sum(rollout.completion_ids) % 5) for rollout in rollouts]


def sampled_run(start: Path, folder: Path, config: Mapping[str, Any], **changes: Any) -> Components:
    """Parts of a run that samples its own completions."""
    required = {"prompts_per_iteration": 2, "num_iterations": 3, "sampling": SamplingConfig(max_new_tokens=6)}
    kl = {"kl": KlConfig(coefficient=0.1, target=0.5, horizon=20)}
    prompts = chat_prompts(ChatTokenizer.load(start), QUESTIONS)
    components = native_components(
        start,
        strategies.rl_config(**required | EVERY | kl | config),
        prompts=prompts[:4],
        reward=function_reward(lengths),
        folder=folder,
    )
    verifier = build_rewards((RewardTerm(kind="math"),), resources=RewardResources())
    held_out = HeldOut(prompts=prompts[4:][: changes.pop("num_problems", 2)], verifier=verifier)
    return replace(components, held_out=held_out, **changes)


WATCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "evaluated often": ({"eval_every": 1}, {"num_problems": 1}),
    "no rules": ({}, {"health": HealthConfig(action="off")}),
    "no audit": ({}, {"health": HealthConfig(audit=AuditConfig(action="off"))}),
    "audited always": ({}, {"health": HealthConfig(audit=AuditConfig(max_time_fraction=1.0, rollouts=6))}),
    "few checkpoints": ({"checkpoints": CheckpointConfig()}, {}),
}


def test_what_only_watches_a_run_changes_none_of_its_bits(start: Path, tmp_path: Path) -> None:
    plain = sampled_run(start, tmp_path / "plain", {})
    outcome = train(plain, Tape())
    assert any(row["gradient_norm"] > 0.0 for row in outcome.history)
    for name, (config, changes) in WATCHED.items():
        watched = sampled_run(start, tmp_path / name, config, **changes)
        train(watched, Tape())
        assert is_same(watched, plain), name


def without_evaluation(outcome: TrainResult) -> list[dict[str, float]]:
    """The history without costs and evaluations."""
    return [{key: value for key, value in row.items() if "eval/" not in key} for row in without_costs(outcome)]


def test_a_run_may_be_watched_otherwise_when_it_resumes(start: Path, tmp_path: Path) -> None:
    plain = sampled_run(start, tmp_path / "plain", {})
    expected = without_evaluation(train(plain, Tape()))
    for name, (config, changes) in WATCHED.items():
        folder = tmp_path / name
        with pytest.raises(KilledError):
            train(sampled_run(start, folder, {}), Tape(killed_in=2))
        with pytest.raises(KilledError):
            train(sampled_run(start, folder, config, **dict(changes)), Tape(killed_in=3))
        again = sampled_run(start, folder, {})
        assert without_evaluation(train(again, Tape())) == expected, name
        assert is_same(again, plain), name
