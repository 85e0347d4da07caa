"""Episodes with branches and training samples against their rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlcore.agents.sampler import AgentSampler
from rlcore.checks.audit.comparison import rollout_error, sample_errors
from rlcore.checks.audit.prompt_checks import choose_episodes, group_errors
from rlcore.config import AuditConfig, CheckpointConfig, HealthConfig, KlConfig, SamplingConfig, UpdateConfig
from rlcore.errors import CanaryError
from rlcore.loop import Components, train
from rlcore.rewards.user_function import function_reward
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training import learner as learner_module
from rlcore.training.experience import Experience
from rlcore.training.minibatches import token_weights
from rlcore.types import Message, Rollout, ScoredRollout, TrainingSample
from tests import strategies
from tests.forking import ForkingSampler
from tests.rlcore.agents.programs import agent
from tests.rlcore.checks.audit.test_reference_impl import experience_of
from tests.rlcore.loop.conftest import KilledError, MakeComponents, Tape, weights

CONFIG = strategies.rl_config(sampling=SamplingConfig(max_new_tokens=8))

ALWAYS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0))

Groups = list[list[ScoredRollout]]


def plain() -> Groups:
    return strategies.random_groups(strategies.tiny_llama(), 3)


def branched() -> Groups:
    """Three groups of three episodes; the first of each has a branch that shares its first token."""
    groups = plain()
    for group in groups:
        rollout, other = group[0].rollout, group[1]
        shared = rollout.completion_ids[:1] + other.rollout.completion_ids
        mask = (False,) + (True,) * len(other.rollout.completion_ids)
        logprobs = (0.0, *other.rollout.sampler_logprobs)
        branch = dataclasses.replace(rollout, completion_ids=shared, loss_mask=mask, sampler_logprobs=logprobs)
        group[0] = strategies.forked(group[0], dataclasses.replace(group[0], rollout=branch))
    return groups


def of(groups: Groups) -> Experience:
    return experience_of(groups, CONFIG, strategies.tiny_llama())


def with_first(groups: Groups, **changes: Any) -> Groups:
    """Groups in which the first rollout is changed."""
    rollout = dataclasses.replace(groups[0][0].rollout, **changes)
    return [[dataclasses.replace(groups[0][0], rollout=rollout), *groups[0][1:]], *groups[1:]]


def found(groups: Groups, made: Experience, *, has_tools: bool = True) -> list[str]:
    return [str(each) for each in sample_errors(groups, made, CONFIG, penalty=0.0, has_tools=has_tools)]


def changed(made: Experience, change: Callable[[list[TrainingSample]], Sequence[TrainingSample]]) -> Experience:
    samples = tuple(change(list(made.samples)))
    return dataclasses.replace(made, samples=samples, next_values=(0.0,) * len(samples))


def test_a_correct_iteration_has_no_discrepancy() -> None:
    groups = branched()
    assert [sample.episode for sample in of(groups).samples] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert found(groups, of(groups)) == []
    assert found(plain(), of(plain()), has_tools=False) == []


def test_answers_that_are_trained_twice_or_never_are_found() -> None:
    groups = branched()
    rollout = groups[0][0].rollout
    (branch,) = rollout.branches
    twice = with_first(groups, branches=(dataclasses.replace(branch, loss_mask=(True,) * len(branch.loss_mask)),))
    assert found(twice, of(twice)) == [
        f"the tokens of an episode that are trained on: expected the {rollout.num_sampled} that were sampled, "
        f"found {(rollout.num_sampled or 0) + 1}, in 2 samples"
    ]
    lost = with_first(groups, branches=())
    assert len(found(lost, of(lost))) == 1
    uncounted = with_first(groups, num_sampled=None)
    (text,) = found(uncounted, of(uncounted))
    assert "expected a count of the sampled ones" in text


def per_branch(groups: Groups) -> list[float]:
    """The advantage of each sample if every sample is a member of its group."""
    alone = [
        [
            dataclasses.replace(item, rollout=dataclasses.replace(one, branches=()))
            for item in group
            for one in item.rollout.samples
        ]
        for group in groups
    ]
    return [float(sample.advantages[-1]) for sample in of(alone).samples]


def test_an_advantage_per_branch_instead_of_per_episode_is_found() -> None:
    groups = branched()
    wrong = changed(
        of(groups),
        lambda samples: [
            dataclasses.replace(sample, advantages=value * sample.loss_mask)
            for sample, value in zip(samples, per_branch(groups), strict=True)
        ],
    )
    assert found(groups, wrong)[0].startswith("the advantage of token 1 of")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda samples: samples[:-1], "samples to train on: expected 12, found 11"),
        (lambda samples: [*samples, samples[0]], "samples to train on: expected 12, found 13"),
        (
            lambda samples: [dataclasses.replace(each, episode=number) for number, each in enumerate(samples)],
            "the episode of sample 1: expected 0 of group 0, found 1 of group 0",
        ),
        (
            lambda samples: [dataclasses.replace(each, group=0) for each in samples],
            "the episode of sample 4: expected 3 of group 1, found 3 of group 0",
        ),
    ],
)
def test_samples_of_another_number_episode_or_group_are_found(change: Any, text: str) -> None:
    groups = branched()
    assert found(groups, changed(of(groups), change)) == [text]


def test_an_agents_prompts_may_differ_within_a_group_and_others_may_not() -> None:
    groups, config = branched(), strategies.rl_config(prompts_per_iteration=3)
    own = with_first(groups, prompt=dataclasses.replace(groups[0][0].rollout.prompt, token_ids=(9,)))
    scheduled = [group[0].rollout.prompt for group in own]
    assert list(group_errors(own, scheduled, config, num_missing=0)) == []
    (error,) = group_errors(with_first(own, branches=(), num_sampled=None), scheduled, config, num_missing=0)
    assert "different tokens" in str(error)


def test_one_of_the_audited_episodes_has_branches_and_an_advantage_if_there_is_any() -> None:
    made = of(branched())
    for number in range(8):
        chosen = choose_episodes(made.samples, 2, seed=0, iteration=number)
        assert len(chosen) == 2
        assert len(chosen[0]) == 2
        assert all(made.samples[index].episode == made.samples[own[0]].episode for own in chosen for index in own)


def per_sample(**change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change a field of every sample."""
    ((name, function),) = change.items()
    return lambda them: [dataclasses.replace(each, **{name: function(getattr(each, name))}) for each in them]


CHANGES: dict[str, tuple[Any, str]] = {
    "mask": (per_sample(loss_mask=lambda m: m.index_fill(0, torch.tensor([0]), False)), "the loss mask of token 1 of"),
    "tokens": (per_sample(completion_ids=lambda ids: (*ids[::-1], 1)), "training tokens"),
    "logprobs": (per_sample(sampler_logprobs=lambda values: values - 1.0), "engine's log-probabilities"),
    "sign": (per_sample(advantages=lambda values: -values), "the advantage of token 1 of"),
    "zero": (per_sample(advantages=lambda values: 0.0 * values), "the advantage of token 1 of"),
    "of another completion": (
        lambda them: [
            dataclasses.replace(each, advantages=torch.full_like(each.advantages, float(them[n - 1].advantages[0])))
            for n, each in enumerate(them)
        ],
        "the advantage of token",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sample_that_is_not_its_rollout_is_named(name: str) -> None:
    change, says = CHANGES[name]
    assert says in found(plain(), changed(of(plain()), change), has_tools=False)[0]


def test_a_value_beyond_an_end_that_nothing_follows_is_found() -> None:
    made = of(plain())
    made = dataclasses.replace(made, next_values=(*made.next_values[:-1], 0.3))
    assert found(plain(), made)[0] == "the critic's value beyond an end: expected 0, found 0.3"


def test_a_completion_that_was_cut_has_as_many_tokens_as_the_limit() -> None:
    groups = with_first(plain(), finish_reason="length")
    assert len(groups[0][0].rollout.completion_ids) < 8
    assert "truncated completion: expected 8 tokens" in found(groups, of(plain()), has_tools=False)[0]
    assert found(groups, of(plain())) == []  # an episode may be cut by its turns


def test_a_text_that_is_not_that_of_its_tokens_is_found(tokenizer: ChatTokenizer) -> None:
    sample = of(plain()).samples[0]
    ids = tokenizer.encode("seven") + tokenizer.end_of_turn
    prompt_ids = tokenizer.render_prompt([Message(role="user", content="3+4")])
    sample = dataclasses.replace(sample, prompt_ids=prompt_ids)
    item = strategies.scored_rollout(1.0, prompt_ids=prompt_ids, completion_ids=ids)
    right = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, text="seven"))
    assert rollout_error(right, sample, tokenizer, prompt_ids) is None
    error = rollout_error(item, sample, tokenizer, prompt_ids)
    assert error is not None and str(error) == "the text that was scored: expected 'seven', found ''"
    error = rollout_error(right, sample, tokenizer, prompt_ids[1:])
    assert error is not None and str(error).startswith("the prompt's tokens: expected")
    assert "rollout of prompt" in error.where


def agent_components(make: MakeComponents, **changes: Any) -> Components:
    """A run whose episodes have several samples."""
    components = make(**({"health": ALWAYS} | changes))
    return dataclasses.replace(components, sampler=ForkingSampler(components.engine))


@pytest.mark.parametrize(
    "config",
    [
        {"algorithm": "grpo"},
        {"algorithm": "gspo", "update": UpdateConfig(num_epochs=2)},
        {"algorithm": "rloo", "kl": KlConfig(coefficient=0.1, apply_to="reward")},
        {"algorithm": "dapo", "kl": KlConfig(coefficient=0.1)},
    ],
)
def test_runs_with_branches_pass_the_audit_which_changes_nothing(
    config: dict[str, Any], make_components: MakeComponents
) -> None:
    off = HealthConfig(audit=AuditConfig(action="off"))
    runs = [
        agent_components(make_components, config=config, health=health, folder=str(number))
        for number, health in enumerate((ALWAYS, off))
    ]
    tape = Tape()
    for components in runs:
        train(components, tape)
    assert torch.equal(*map(weights, runs))
    assert tape.rows[0]["audit/rollouts"] == 2.0
    assert [row["episode/branches"] for row in tape.rows] == [pytest.approx((3 + 1 + 3) / 3)] * 8


def test_a_weight_per_branch_instead_of_per_episode_ends_the_run_before_a_weight_moves(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_sample(algorithm: Any, samples: Sequence[TrainingSample]) -> Any:
        return token_weights(algorithm, [dataclasses.replace(one, episode=n) for n, one in enumerate(samples)])

    monkeypatch.setattr(learner_module, "token_weights", by_sample)
    components = agent_components(make_components)
    before = weights(components)
    with pytest.raises(CanaryError, match=r"of a few samples: expected|the gradient of"):
        train(components, Tape())
    assert torch.equal(before, weights(components))


def test_a_shared_answer_that_is_trained_twice_ends_the_run(make_components: MakeComponents) -> None:
    components = agent_components(make_components)
    components = dataclasses.replace(components, sampler=ForkingSampler(components.engine, trains_twice=True))
    with pytest.raises(CanaryError, match="tokens are trained on, and"):
        train(components, Tape())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_branches_resumes_with_the_bits_of_one_that_was_not_killed(
    staleness: int, make_components: MakeComponents
) -> None:
    sampling = SamplingConfig(max_new_tokens=6, staleness=staleness)
    every = {"config": {"checkpoints": CheckpointConfig(every_iterations=1), "sampling": sampling}}
    whole, killed = (agent_components(make_components, folder=name, **every) for name in ("whole", "killed"))
    train(whole, Tape())
    with pytest.raises(KilledError):
        train(killed, Tape(killed_in=3))
    again = agent_components(make_components, folder="killed", **every)
    train(again, Tape())
    assert torch.equal(weights(whole), weights(again))


FORKS = """
    first = call(max_tokens=4)
    call([*USER, first, *say("more")], max_tokens=4)
    call([{"role": "system", "content": "Be brief."}, *USER], max_tokens=4, n=2)
    call([*USER, first, *say("otherwise")])
"""


def test_an_agent_program_with_forks_cut_answers_and_several_choices_passes_the_audit(
    make_components: MakeComponents,
) -> None:
    sampling = SamplingConfig(max_new_tokens=48)
    components = make_components(config={"num_iterations": 2, "sampling": sampling}, health=ALWAYS)
    engine = components.engine._scorer
    sampler = AgentSampler(engine, components.tokenizer, agent(FORKS))
    tape = Tape()
    train(dataclasses.replace(components, engine=engine, sampler=sampler, reward=function_reward(lengths)), tape)
    assert [row["audit/rollouts"] for row in tape.rows] == [2.0, 4.0]
    assert all(row["episode/branches"] > 2.0 for row in tape.rows)
    episodes = [item.rollout for drawn in tape.drawn for group in drawn.groups for item in group]
    assert all(rollout.num_sampled == sum(sum(one.loss_mask) for one in rollout.samples) for rollout in episodes)
    assert all(branch.fork for rollout in episodes for branch in rollout.branches)


def lengths(rollouts: Sequence[Rollout]) -> list[Any]:
    return [float(len(rollout.text)) for rollout in rollouts]
