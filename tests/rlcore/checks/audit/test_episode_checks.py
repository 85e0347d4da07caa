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
from rlcore.loop import Components, train, update
from rlcore.rewards.user_function import function_reward
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training import learner as learner_module
from rlcore.training.experience import Experience, build_experience
from rlcore.training.minibatches import token_weights
from rlcore.types import Message, Rollout, ScoredRollout, TrainingSample
from tests import strategies
from tests.forking import ForkingSampler
from tests.rlcore.agents.programs import agent
from tests.rlcore.checks.audit.test_reference_impl import experience_of
from tests.rlcore.loop.conftest import KilledError, MakeComponents, Tape, weights

CONFIG = strategies.rl_config()

ALWAYS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0))


def iteration() -> tuple[list[list[ScoredRollout]], Experience]:
    """Three groups of three episodes; the first of each has a branch that shares its first token."""
    policy = strategies.tiny_llama()
    groups = strategies.random_groups(policy, 3)
    for group in groups:
        rollout, other = group[0].rollout, group[1]
        shared = rollout.completion_ids[:1] + other.rollout.completion_ids
        mask = (False,) + (True,) * len(other.rollout.completion_ids)
        logprobs = (0.0, *other.rollout.sampler_logprobs)
        branch = dataclasses.replace(rollout, completion_ids=shared, loss_mask=mask, sampler_logprobs=logprobs)
        group[0] = strategies.forked(group[0], dataclasses.replace(group[0], rollout=branch))
    return groups, experience_of(groups, CONFIG, policy)


def found(groups: Any, made: Experience) -> list[str]:
    return [str(each) for each in sample_errors(groups, made, CONFIG, penalty=0.0, has_tools=True)]


def changed(made: Experience, change: Callable[[list[TrainingSample]], Sequence[TrainingSample]]) -> Experience:
    samples = tuple(change(list(made.samples)))
    return dataclasses.replace(made, samples=samples, next_values=(0.0,) * len(samples))


def test_a_correct_iteration_with_branches_has_no_discrepancy() -> None:
    groups, made = iteration()
    assert [sample.episode for sample in made.samples] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert found(groups, made) == []


def test_a_shared_answer_that_is_trained_twice_is_found() -> None:
    groups, _ = iteration()
    item = groups[0][0]
    (branch,) = item.rollout.branches
    twice = dataclasses.replace(branch, loss_mask=(True,) * len(branch.loss_mask))
    groups[0][0] = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, branches=(twice,)))
    sampled = item.rollout.num_sampled
    made = experience_of(groups, CONFIG, strategies.tiny_llama())
    assert found(groups, made) == [
        f"the tokens of an episode that are trained on: expected the {sampled} that were sampled, "
        f"found {sampled + 1}, in 2 samples"
    ]


def test_an_answer_that_was_sampled_and_is_in_no_sample_is_found() -> None:
    groups, _ = iteration()
    item = groups[1][0]
    groups[1][0] = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, branches=()))
    made = experience_of(groups, CONFIG, strategies.tiny_llama())
    assert len(found(groups, made)) == 1


def test_branches_without_a_count_of_the_sampled_tokens_are_refused() -> None:
    groups, _ = iteration()
    item = groups[0][0]
    groups[0][0] = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, num_sampled=None))
    (text,) = found(groups, experience_of(groups, CONFIG, strategies.tiny_llama()))
    assert "expected a count of the sampled ones" in text


def per_branch(groups: list[list[ScoredRollout]]) -> list[float]:
    """The advantage of each sample if every sample is a member of its group."""
    parts = [
        [dataclasses.replace(item, rollout=one) for item in group for one in item.rollout.samples] for group in groups
    ]
    alone = [
        [dataclasses.replace(each, rollout=dataclasses.replace(each.rollout, branches=())) for each in group]
        for group in parts
    ]
    return [float(sample.advantages[-1]) for sample in experience_of(alone, CONFIG, strategies.tiny_llama()).samples]


def test_an_advantage_per_branch_instead_of_per_episode_is_found() -> None:
    groups, made = iteration()
    wrong = changed(
        made,
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
    groups, made = iteration()
    assert found(groups, changed(made, change)) == [text]


def test_an_agents_prompts_may_differ_within_a_group_and_others_may_not() -> None:
    groups, _ = iteration()
    config = strategies.rl_config(prompts_per_iteration=3)
    item = groups[0][0].rollout
    own = dataclasses.replace(item, prompt=dataclasses.replace(item.prompt, token_ids=(9,)))
    groups[0][0] = dataclasses.replace(groups[0][0], rollout=own)
    scheduled = [group[0].rollout.prompt for group in groups]
    assert list(group_errors(groups, scheduled, config, num_missing=0)) == []
    groups[0][0] = dataclasses.replace(groups[0][0], rollout=dataclasses.replace(own, branches=(), num_sampled=None))
    (error,) = group_errors(groups, scheduled, config, num_missing=0)
    assert "different tokens" in str(error)


def test_one_of_the_audited_episodes_has_branches_and_an_advantage_if_there_is_any() -> None:
    _, made = iteration()
    for number in range(8):
        chosen = choose_episodes(made.samples, 2, seed=0, iteration=number)
        assert len(chosen) == 2
        assert len(chosen[0]) == 2
        assert all(made.samples[index].episode == made.samples[own[0]].episode for own in chosen for index in own)


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


def test_an_advantage_per_branch_ends_the_run(make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*arguments: Any, **settings: Any) -> Experience:
        made = build_experience(*arguments, **settings)
        sizes = [sum(one.episode == each.episode for one in made.samples) for each in made.samples]
        samples = [
            dataclasses.replace(each, advantages=each.advantages / size)
            for each, size in zip(made.samples, sizes, strict=True)
        ]
        return dataclasses.replace(made, samples=tuple(samples))

    monkeypatch.setattr(update, "build_experience", doubled)
    with pytest.raises(CanaryError, match="the advantage of token"):
        train(agent_components(make_components), Tape())


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


Change = Callable[[TrainingSample], TrainingSample]

CONFIG_OF_COMPARISON = strategies.rl_config(sampling=SamplingConfig(max_new_tokens=8))


def pieces() -> tuple[list[list[ScoredRollout]], list[TrainingSample]]:
    policy = strategies.tiny_llama()
    groups = strategies.random_groups(policy, 3)
    return groups, list(experience_of(groups, CONFIG_OF_COMPARISON, policy).samples)


def found_of_comparison(groups: Any, samples: Any, *, has_tools: bool = False) -> list[str]:
    made = Experience(samples=tuple(samples), metrics={}, mean_kl=0.0, next_values=(0.0,) * len(samples))
    return [str(fault) for fault in sample_errors(groups, made, CONFIG_OF_COMPARISON, penalty=0.0, has_tools=has_tools)]


def test_a_value_beyond_an_end_that_nothing_follows_is_found() -> None:
    groups, samples = pieces()
    made = Experience(samples=tuple(samples), metrics={}, mean_kl=0.0, next_values=(*[0.0] * (len(samples) - 1), 0.3))
    (fault, *_) = sample_errors(groups, made, CONFIG_OF_COMPARISON, penalty=0.0, has_tools=False)
    assert str(fault) == "the critic's value beyond an end: expected 0, found 0.3"


def test_a_correct_iteration_has_no_error() -> None:
    assert found_of_comparison(*pieces()) == []


def first_masked(sample: TrainingSample) -> TrainingSample:
    return dataclasses.replace(sample, loss_mask=sample.loss_mask.index_fill(0, torch.tensor([0]), False))


CHANGES: dict[str, tuple[Change, str]] = {
    "mask": (first_masked, "the loss mask of token 1 of"),
    "tokens": (lambda s: dataclasses.replace(s, completion_ids=(*s.completion_ids[::-1], 1)), "training tokens"),
    "logprobs": (
        lambda s: dataclasses.replace(s, sampler_logprobs=s.sampler_logprobs - 1.0),
        "engine's log-probabilities",
    ),
    "sign": (lambda s: dataclasses.replace(s, advantages=-s.advantages), "the advantage of token 1 of"),
    "zero": (lambda s: dataclasses.replace(s, advantages=0.0 * s.advantages), "the advantage of token 1 of"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sample_that_is_not_its_rollout_is_named(name: str) -> None:
    change, says = CHANGES[name]
    groups, samples = pieces()
    assert says in found_of_comparison(groups, [change(sample) for sample in samples])[0]


def test_advantages_of_another_completion_and_samples_that_are_missing_are_found() -> None:
    groups, samples = pieces()
    values = [float(sample.advantages[0]) for sample in samples]
    turned = [
        dataclasses.replace(sample, advantages=torch.full_like(sample.advantages, values[place - 1]))
        for place, sample in enumerate(samples)
    ]
    assert "the advantage of token" in found_of_comparison(groups, turned)[0]
    assert found_of_comparison(groups, samples[:-1]) == ["samples to train on: expected 9, found 8"]


def test_a_completion_that_was_cut_has_as_many_tokens_as_the_limit() -> None:
    groups, samples = pieces()
    short = groups[0][0]
    assert len(short.rollout.completion_ids) < 8
    groups[0][0] = dataclasses.replace(short, rollout=dataclasses.replace(short.rollout, finish_reason="length"))
    assert "truncated completion: expected 8 tokens" in found_of_comparison(groups, samples)[0]
    assert found_of_comparison(groups, samples, has_tools=True) == []  # an episode may be cut by its turns


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    from rlcore.config import ModelConfig
    from rlcore.models.importing import import_model
    from tests.rlcore.loop.conftest import SHAPE

    folder = tmp_path_factory.mktemp("audit") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return ChatTokenizer.load(folder)


def test_a_text_that_is_not_that_of_its_tokens_is_found(tokenizer: ChatTokenizer) -> None:
    _, samples = pieces()
    ids = tokenizer.encode("seven") + tokenizer.end_of_turn
    prompt_ids = tokenizer.render_prompt([Message(role="user", content="3+4")])
    sample = dataclasses.replace(samples[0], prompt_ids=prompt_ids)
    item = strategies.scored_rollout(1.0, prompt_ids=prompt_ids, completion_ids=ids)
    right = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, text="seven"))
    assert rollout_error(right, sample, tokenizer, prompt_ids) is None
    fault = rollout_error(item, sample, tokenizer, prompt_ids)
    assert fault is not None and str(fault) == "the text that was scored: expected 'seven', found ''"
    fault = rollout_error(right, sample, tokenizer, prompt_ids[1:])
    assert fault is not None and str(fault).startswith("the prompt's tokens: expected")
    assert "rollout of prompt" in fault.where
