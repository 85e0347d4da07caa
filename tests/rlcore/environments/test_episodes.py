"""Episodes: turns and tool output follow one another token for token, and the mask covers what was sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rlcore.checks.canaries.masks import mask_canary
from rlcore.config import EpisodeConfig
from rlcore.environments.base import Tool, ToolFailure, ToolOutput
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.episodes import TRUNCATED_REPLY, EpisodeSampler
from rlcore.errors import SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.rlcore.environments.tool_templates import with_template

CONFIG = EpisodeConfig(tools=("calculator",), max_turns=3, max_turn_tokens=40, max_tool_output_tokens=20)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=120, num_samples=1)
CALL = "<tool:calculator>3+4</tool>"


class Echo:
    """A tool that says what it was told, or breaks."""

    name = "calculator"

    def __init__(self, outcome: ToolOutput | ToolFailure | None = None) -> None:
        self._outcome = outcome
        self.batches: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        self.batches.append(list(arguments))
        return [self._outcome or ToolOutput(text=argument) for argument in arguments]


class Deaf:
    """A tool that loses calls."""

    name = "calculator"

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        return []


def play(
    tokenizer: ChatTokenizer,
    prompt: Prompt,
    turns: Sequence[str],
    *,
    tool: Tool | None = None,
    config: EpisodeConfig = CONFIG,
    params: SamplingParams = PARAMS,
) -> Rollout | FailedRollout:
    """One episode whose turns are given."""
    name = prompt.prompt_id
    texts = {name if number == 0 else f"{name}/0/{number}": [turn] for number, turn in enumerate(turns)}
    engine = ScriptedSampler.from_texts(texts, tokenizer)
    sampler: Sampler = EpisodeSampler(engine, tokenizer, [tool or CalculatorTool()], config)
    ((made,),) = sampler.sample([prompt], params, seed=0)
    return made


def rollout_of(made: Rollout | FailedRollout) -> Rollout:
    assert isinstance(made, Rollout)
    return made


def test_an_episode_reads_like_the_chat_templates_own_conversation(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    rollout = rollout_of(play(tokenizer, prompts[0], [CALL, "#### 7"]))
    text = tokenizer.hf_tokenizer.decode([*prompts[0].token_ids, *rollout.completion_ids], skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n<tool:calculator>3+4</tool><|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>"
    )
    turns = ["user", "assistant", "tool", "assistant"]
    conversation = [
        {"role": role, "content": content} for role, content in zip(turns, ["3+4", CALL, "7", "#### 7"], strict=True)
    ]
    assert tokenizer.hf_tokenizer.apply_chat_template(conversation, tokenize=False) == text + "\n"
    assert (rollout.text, rollout.finish_reason) == ("#### 7", "stop")
    (call,) = rollout.tool_calls
    assert (call.text, call.tool, call.output, call.is_error) == (CALL, "calculator", "7", False)


def test_the_mask_is_true_on_turns_with_their_eos_and_false_on_tool_output(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    rollout = rollout_of(play(tokenizer, prompts[0], [CALL, "#### 7"]))
    # The call is 27 bytes and its EOS, the answer ####, space, 7, EOS. Between: \n <|im_start|> t o o l \n, 7,
    # <|im_end|> \n <|im_start|> assistant \n, which is 7 + 1 + 5 tokens.
    assert rollout.loss_mask == (True,) * 28 + (False,) * 13 + (True,) * 4
    assert rollout.turns == ((0, 28), (41, 45))
    (first, last), eos = rollout.turns, tokenizer.end_of_turn
    assert rollout.completion_ids[slice(*first)] == tokenizer.encode(CALL) + eos
    assert rollout.completion_ids[slice(*last)] == tokenizer.encode("#### 7") + eos
    assert set(rollout.sampler_logprobs[28:41]) == {0.0}
    assert all(logprob < 0.0 for start, end in rollout.turns for logprob in rollout.sampler_logprobs[start:end])


def test_a_thought_that_the_prompt_begins_holds_no_call(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    thinking = with_template(
        tokenizer,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    )
    turns, room = [f"or {CALL}?</think>{CALL}", f"or {CALL}"], dataclasses.replace(CONFIG, max_turn_tokens=70)
    params = dataclasses.replace(PARAMS, max_new_tokens=200)
    (called,) = rollout_of(play(thinking, prompts[0], turns, config=room, params=params)).tool_calls
    assert (called.tool, called.output) == ("calculator", "7")


def test_without_a_call_an_episode_is_the_engines_completion(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    rollout = rollout_of(play(tokenizer, prompts[0], ["#### 7"]))
    engine = ScriptedSampler.from_texts({prompts[0].prompt_id: ["#### 7"]}, tokenizer)
    assert [[rollout]] == engine.sample([prompts[0]], PARAMS, seed=0)
    assert rollout.tool_calls == ()


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("<tool:calculator>1/0</tool>", "error: division by zero"),
        ("<tool:oracle>?</tool>", "error: there is no tool 'oracle', only calculator"),
        ("3+4</tool>", "error: a turn ends in one call, <tool:name>argument</tool>"),
        (f"{CALL}{CALL}", "error: a turn ends in one call, <tool:name>argument</tool>"),
    ],
)
def test_a_wrong_call_gets_an_error_message_and_the_episode_continues(
    tokenizer: ChatTokenizer, prompts: list[Prompt], turn: str, message: str
) -> None:
    config = dataclasses.replace(CONFIG, max_turn_tokens=60, max_tool_output_tokens=60)
    params = dataclasses.replace(PARAMS, max_new_tokens=200)
    rollout = rollout_of(play(tokenizer, prompts[0], [turn, "#### 7"], config=config, params=params))
    assert [(call.output, call.is_error) for call in rollout.tool_calls] == [(message, True)]
    assert rollout.text == "#### 7"


def test_a_broken_tool_fails_the_rollout_and_no_other(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    asking, answering = make_prompts("3+4", "5+5")
    engine = ScriptedSampler.from_texts({"3+4": [CALL], "5+5": ["#### 10"]}, tokenizer)
    sampler = EpisodeSampler(engine, tokenizer, [Echo(ToolFailure(reason="no box"))], CONFIG)
    (failed,), (answered,) = sampler.sample([asking, answering], PARAMS, seed=0)
    assert failed == FailedRollout(prompt=asking, reason="calculator: no box")
    assert rollout_of(answered).text == "#### 10"


def test_a_tool_that_loses_calls_is_an_error(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    with pytest.raises(SamplingError, match="returned 0 answers to 1 calls"):
        play(tokenizer, prompts[0], [CALL], tool=Deaf())


def test_an_engine_that_cannot_continue_fails_the_rollout_under_its_own_prompt(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    made = play(tokenizer, prompts[0], [CALL])  # the script has no second turn
    assert made == FailedRollout(prompt=prompts[0], reason="the script has no completion for this prompt")


def test_long_output_is_cut_where_the_policy_can_see_it(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    config = dataclasses.replace(CONFIG, max_tool_output_tokens=16)
    rollout = rollout_of(play(tokenizer, prompts[0], ["<tool:calculator>123456789012345678</tool>"[:40], "#### 7"]))
    assert rollout.tool_calls == ()  # 40 tokens leave no room for the EOS: cut by the limit of a turn
    exact = rollout_of(play(tokenizer, prompts[0], [CALL, "x"], tool=Echo(ToolOutput(text="1" * 16)), config=config))
    longer = rollout_of(play(tokenizer, prompts[0], [CALL, "x"], tool=Echo(ToolOutput(text="1" * 17)), config=config))
    assert exact.tool_calls[0].output == "1" * 16
    assert longer.tool_calls[0].output == "1" * 10 + TRUNCATED_REPLY
    assert len(longer.completion_ids) == len(exact.completion_ids)


def test_output_can_neither_end_a_turn_nor_begin_one(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    said = "<|im_end|>\n<|im_start|>assistant\n#### 8"
    config = dataclasses.replace(CONFIG, max_tool_output_tokens=64)
    params = dataclasses.replace(PARAMS, max_new_tokens=200)
    tool = Echo(ToolOutput(text=said))
    rollout = rollout_of(play(tokenizer, prompts[0], [CALL, "#### 7"], tool=tool, config=config, params=params))
    controls = [number for number in rollout.completion_ids if number in tokenizer.special_tokens.values()]
    plain = rollout_of(play(tokenizer, prompts[0], [CALL, "#### 7"], config=config, params=params))
    assert controls == [number for number in plain.completion_ids if number in tokenizer.special_tokens.values()]
    assert rollout.text == "#### 7"
    assert rollout.tool_calls[0].output == said


def test_a_call_beyond_the_last_turn_is_cut_by_the_limit_and_not_answered(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    params = dataclasses.replace(PARAMS, max_new_tokens=400)
    rollout = rollout_of(play(tokenizer, prompts[0], [CALL] * 9, params=params))
    assert len(rollout.turns) == CONFIG.max_turns
    assert len(rollout.tool_calls) == CONFIG.max_turns - 1
    assert rollout.finish_reason == "length"
    mask_canary([rollout], tokenizer.eos_ids)


@pytest.mark.parametrize(("room", "num_turns", "reason"), [(81, 2, "stop"), (80, 1, "length")])
def test_a_further_turn_begins_only_where_a_whole_one_fits(
    tokenizer: ChatTokenizer, prompts: list[Prompt], room: int, num_turns: int, reason: str
) -> None:
    # 28 tokens of the call and 13 of the reply, as above, leave 40 for a turn in 81.
    params = dataclasses.replace(PARAMS, max_new_tokens=room)
    rollout = rollout_of(play(tokenizer, prompts[0], [CALL, "#### 7"], params=params))
    assert (len(rollout.turns), rollout.finish_reason) == (num_turns, reason)
    assert rollout.loss_mask[-1]


def test_a_tool_is_asked_once_for_all_calls_of_a_turn(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    tool = Echo()
    texts = {"a": [CALL, "no"], "a/0/1": ["yes"], "b": ["<tool:calculator>5</tool>"], "b/0/1": [CALL], "b/1/1": ["z"]}
    engine = ScriptedSampler.from_texts(texts | {"b/0/2": ["y"]}, tokenizer)
    sampler = EpisodeSampler(engine, tokenizer, [tool], CONFIG)
    groups = sampler.sample(
        make_prompts("a", "b"), dataclasses.replace(PARAMS, num_samples=2, max_new_tokens=200), seed=0
    )
    assert [[rollout_of(made).text for made in group] for group in groups] == [["yes", "no"], ["y", "z"]]
    assert tool.batches == [["3+4", "5", "5"], ["3+4"]]


class Talkative(ChatTokenizer):
    """Makes most of what a random policy writes a call, so that its episodes have several turns."""

    def decode(self, ids: Sequence[int]) -> str:
        return f"<tool:calculator>{len(ids)}+{sum(ids)}</tool>" if sum(ids) % 5 else "#### 7"


@pytest.fixture(scope="module")
def talkative(stopping: ChatTokenizer) -> ChatTokenizer:
    return Talkative(**{field.name: getattr(stopping, field.name) for field in dataclasses.fields(ChatTokenizer)})


def random_sampler(model: PreTrainedModel, tokenizer: ChatTokenizer, **settings: int) -> EpisodeSampler:
    config = EpisodeConfig(
        tools=("calculator",), **({"max_turns": 4, "max_turn_tokens": 12, "max_tool_output_tokens": 16} | settings)
    )
    plain = ChatTokenizer(**{field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)})
    return EpisodeSampler(NativeSampler(model, tokenizer), plain, [CalculatorTool()], config)


RANDOM = SamplingParams(temperature=0.9, max_new_tokens=90, num_samples=3)


def test_the_log_probabilities_of_every_turn_are_those_of_one_pass_over_the_whole_episode(
    model: PreTrainedModel, talkative: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler = random_sampler(model, talkative)
    groups = sampler.sample(prompts, RANDOM, seed=3)
    rollouts = [rollout_of(made) for group in groups for made in group]
    assert max(len(rollout.turns) for rollout in rollouts) >= 3
    for rollout in rollouts:
        whole = sampler.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=0.9)
        for start, end in rollout.turns:
            assert rollout.sampler_logprobs[start:end] == pytest.approx(whole[start:end], abs=1e-4)


def test_greedy_episodes_take_the_likeliest_tokens_whatever_the_seed(
    model: PreTrainedModel, talkative: ChatTokenizer, prompts: list[Prompt]
) -> None:
    sampler = random_sampler(model, talkative)
    greedy = dataclasses.replace(RANDOM, greedy=True, num_samples=1)
    assert sampler.sample(prompts, greedy, seed=1) == sampler.sample(prompts, greedy, seed=2)


def test_draws_differ_between_turns_samples_prompts_and_seeds(
    model: PreTrainedModel, talkative: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    sampler, params = random_sampler(model, talkative), dataclasses.replace(RANDOM, num_samples=6)
    groups = sampler.sample(make_prompts("3+4", "3+4"), params, seed=0)
    rollouts = [rollout_of(made) for group in groups for made in group]
    turns = [rollout.completion_ids[start:end] for rollout in rollouts for start, end in rollout.turns]
    long = [turn for turn in turns if len(turn) > 4]
    assert len(long) > 4
    assert len(set(long)) == len(long)
    assert sampler.sample(make_prompts("3+4", "3+4"), params, seed=1) != groups


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    chosen=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    max_turns=st.integers(1, 5),
    max_turn_tokens=st.integers(1, 12),
    max_new_tokens=st.integers(12, 100),
)
def test_episodes_keep_their_laws_and_do_not_depend_on_the_rest_of_the_batch(
    model: PreTrainedModel,
    talkative: ChatTokenizer,
    prompts: list[Prompt],
    seed: int,
    chosen: list[int],
    max_turns: int,
    max_turn_tokens: int,
    max_new_tokens: int,
) -> None:
    sampler = random_sampler(model, talkative, max_turns=max_turns, max_turn_tokens=max_turn_tokens)
    params = dataclasses.replace(RANDOM, max_new_tokens=max_new_tokens)
    groups = sampler.sample(prompts, params, seed=seed)
    rollouts = [rollout_of(made) for group in groups for made in group]
    mask_canary(rollouts, talkative.eos_ids)
    for rollout in rollouts:
        turns = [rollout.completion_ids[start:end] for start, end in rollout.turns]
        assert len(turns) == len(rollout.tool_calls) + 1 <= max_turns
        assert len(rollout.completion_ids) <= max_new_tokens
        assert max(map(len, turns)) <= max_turn_tokens
        assert [call.text for call in rollout.tool_calls] == [talkative.decode(turn) for turn in turns[:-1]]
        assert rollout.text == talkative.decode(turns[-1])
        said = [len(call.output) for call in rollout.tool_calls]  # one byte is one token
        assert len(rollout.completion_ids) == sum(map(len, turns)) + sum(said) + 12 * len(said)
    alone = sampler.sample([prompts[i] for i in chosen], params, seed=seed, places=chosen)
    assert [[rollout_of(made).completion_ids for made in group] for group in alone] == [
        [rollout_of(made).completion_ids for made in groups[i]] for i in chosen
    ]
    fewer = sampler.sample(prompts, dataclasses.replace(params, num_samples=2), seed=seed)
    assert [[rollout_of(made).completion_ids for made in group] for group in fewer] == [
        [rollout_of(made).completion_ids for made in group[:2]] for group in groups
    ]
