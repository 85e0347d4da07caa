"""The engine that replays: the same protocol as an engine that computes."""

from __future__ import annotations

import math

import pytest
from transformers import PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedCompletion, ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=3)


def test_texts_are_replayed_in_turn_with_the_end_of_their_turn(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    sampler: Sampler = ScriptedSampler.from_texts({"3+4": ["#### 7", "no"]}, tokenizer, policy_version=2)
    (group,) = sampler.sample(prompts[:1], PARAMS, seed=0)
    rollouts = [rollout for rollout in group if isinstance(rollout, Rollout)]
    assert [rollout.text for rollout in rollouts] == ["#### 7", "no", "#### 7"]
    assert [rollout.finish_reason for rollout in rollouts] == ["stop"] * 3
    assert rollouts[0].completion_ids == tokenizer.render_demonstration(prompts[0].messages, "#### 7")[1]
    assert rollouts[0].sampler_logprobs == pytest.approx((-math.log(262),) * 4)
    assert rollouts[0].loss_mask == (True,) * 4
    assert rollouts[0].policy_version == 2


def test_token_ids_are_replayed_with_their_log_probabilities(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    completion = ScriptedCompletion(completion_ids=(9, 8, 1), sampler_logprobs=(-0.5, -1.5, -0.25))
    sampler = ScriptedSampler({"1": [completion]}, tokenizer)
    ((rollout, *_),) = sampler.sample([prompts[2]], PARAMS, seed=0)
    assert isinstance(rollout, Rollout)
    assert (rollout.completion_ids, rollout.sampler_logprobs) == ((9, 8, 1), (-0.5, -1.5, -0.25))
    assert sampler.logprobs(prompts[2].token_ids, (9, 8, 1), temperature=1.0) == [-0.5, -1.5, -0.25]
    with pytest.raises(SamplingError, match="is not in the script"):
        sampler.logprobs(prompts[2].token_ids, (9, 8), temperature=1.0)


def test_a_script_longer_than_the_limit_is_cut_by_length(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    sampler = ScriptedSampler.from_texts({"1": ["123456789"]}, tokenizer)
    ((rollout, *_),) = sampler.sample([prompts[2]], PARAMS, seed=0)
    assert isinstance(rollout, Rollout)
    assert (rollout.text, rollout.finish_reason, len(rollout.sampler_logprobs)) == ("12345678", "length", 8)


def test_greedy_replays_the_first_alone(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    sampler = ScriptedSampler.from_texts({"1": ["a", "b"]}, tokenizer)
    greedy = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=2, greedy=True)
    (group,) = sampler.sample([prompts[2]], greedy, seed=0)
    assert [rollout.text for rollout in group if isinstance(rollout, Rollout)] == ["a", "a"]


def test_a_prompt_outside_the_script_fails(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    (group,) = ScriptedSampler({}, tokenizer).sample(prompts[:1], PARAMS, seed=0)
    assert [type(rollout) for rollout in group] == [FailedRollout] * 3


def test_weights_change_the_version(tokenizer: ChatTokenizer) -> None:
    sampler = ScriptedSampler({}, tokenizer)
    sampler.load_weights({}, policy_version=9)
    assert sampler.policy_version == 9


def test_a_script_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(SamplingError, match="3 tokens and 2 log-probabilities"):
        ScriptedCompletion(completion_ids=(1, 2, 3), sampler_logprobs=(-1.0, -1.0))


def test_with_a_scorer_the_tokens_are_the_scripts_and_the_log_probabilities_the_models(
    tokenizer: ChatTokenizer, prompts: list[Prompt], model: PreTrainedModel
) -> None:
    scorer = NativeSampler(model, tokenizer)
    sampler = ScriptedSampler.from_texts({"3+4": ["7", "no"]}, tokenizer, scorer=scorer)
    (group,) = sampler.sample(prompts[:1], SamplingParams(temperature=0.7, max_new_tokens=8, num_samples=2), seed=0)
    for rollout, text in zip(group, ("7", "no"), strict=True):
        assert isinstance(rollout, Rollout) and rollout.text == text
        expected = scorer.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=0.7)
        assert list(rollout.sampler_logprobs) == expected
    state = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    assert sampler.differing_parts(state)
    sampler.load_weights(state, policy_version=1)
    assert (sampler.differing_parts(state), sampler.policy_version, scorer.policy_version) == ([], 1, 1)
