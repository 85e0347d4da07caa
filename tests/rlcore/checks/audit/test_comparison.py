"""Every difference between rollouts and the samples that are trained on is named with its rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.checks.audit.comparison import rollout_error, sample_errors
from rlcore.config import SamplingConfig
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.experience import Experience
from rlcore.types import Message, ScoredRollout, TrainingSample
from tests import strategies
from tests.rlcore.checks.audit.test_reference_impl import experience_of

Change = Callable[[TrainingSample], TrainingSample]
CONFIG = strategies.rl_config(sampling=SamplingConfig(max_new_tokens=8))


def pieces() -> tuple[list[list[ScoredRollout]], list[TrainingSample]]:
    policy = strategies.tiny_llama()
    groups = strategies.random_groups(policy, 3)
    return groups, list(experience_of(groups, CONFIG, policy).samples)


def found(groups: Any, samples: Any, *, has_tools: bool = False) -> list[str]:
    made = Experience(samples=tuple(samples), metrics={}, mean_kl=0.0, next_values=(0.0,) * len(samples))
    return [str(fault) for fault in sample_errors(groups, made, CONFIG, penalty=0.0, has_tools=has_tools)]


def test_a_value_beyond_an_end_that_nothing_follows_is_found() -> None:
    groups, samples = pieces()
    made = Experience(samples=tuple(samples), metrics={}, mean_kl=0.0, next_values=(*[0.0] * (len(samples) - 1), 0.3))
    (fault, *_) = sample_errors(groups, made, CONFIG, penalty=0.0, has_tools=False)
    assert str(fault) == "the critic's value beyond an end: expected 0, found 0.3"


def test_a_sound_iteration_has_no_fault() -> None:
    assert found(*pieces()) == []


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
    assert says in found(groups, [change(sample) for sample in samples])[0]


def test_advantages_of_another_completion_and_samples_that_are_missing_are_found() -> None:
    groups, samples = pieces()
    values = [float(sample.advantages[0]) for sample in samples]
    turned = [
        dataclasses.replace(sample, advantages=torch.full_like(sample.advantages, values[place - 1]))
        for place, sample in enumerate(samples)
    ]
    assert "the advantage of token" in found(groups, turned)[0]
    assert found(groups, samples[:-1]) == ["samples to train on: expected 9, found 8"]


def test_a_completion_that_was_cut_has_as_many_tokens_as_the_limit() -> None:
    groups, samples = pieces()
    short = groups[0][0]
    assert len(short.rollout.completion_ids) < 8
    groups[0][0] = dataclasses.replace(short, rollout=dataclasses.replace(short.rollout, finish_reason="length"))
    assert "truncated completion: expected 8 tokens" in found(groups, samples)[0]
    assert found(groups, samples, has_tools=True) == []  # an episode may be cut by its turns


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
