"""Episodes with an environment: in every format, token for token, with what they add to prompts and what they pay."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from rlcore.checks.canaries.masks import mask_canary
from rlcore.config import EpisodeConfig
from rlcore.environments.base import Tool
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.environment import wrap_environment
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.scripted import ScriptedCompletion, ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.rlcore.environments.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_CONTROLS, with_template

CONFIG = EpisodeConfig(environment="game:Guess", max_turns=4, max_turn_tokens=100, max_tool_output_tokens=40)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=1500, num_samples=1)


class Guess:
    """Number guessing; what goes wrong is decided by the prompt."""

    def __init__(self, start: str = "") -> None:
        self.start = start

    def reset(self, prompt: Prompt, rng: random.Random) -> str | None:
        self.number, self.tries, self.won = 7, 0, False
        if "unseeded" in prompt.prompt_id:
            return str(random.random())
        if "broken" in prompt.prompt_id:
            raise RuntimeError("no board")
        return self.start or None

    def guess(self, number: int) -> str:
        """Says whether your guess is right, too low or too high.

        Args:
            number: your guess
        """
        self.tries += 1
        self.won = number == self.number
        return 'right "!"' if self.won else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return self.won / max(1, self.tries)


def play(
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    script: dict[str, str],
    *,
    config: EpisodeConfig = CONFIG,
    start: str = "",
    params: SamplingParams = PARAMS,
    tools: Sequence[Tool] = (),
) -> list[list[Rollout | FailedRollout]]:
    """Episodes whose turns are given as texts, in which control tokens are."""
    turns = {name: tokenizer.encode(text, "template") + tokenizer.end_of_turn for name, text in script.items()}
    known = {
        name: [ScriptedCompletion(completion_ids=ids, sampler_logprobs=(-1.0,) * len(ids))]
        for name, ids in turns.items()
    }
    environment = wrap_environment(Guess, {"start": start})
    sampler = EpisodeSampler(ScriptedSampler(known, tokenizer), tokenizer, tools, config, environment)
    return sampler.sample(prompts, params, seed=0)


def rollout_of(made: Rollout | FailedRollout) -> Rollout:
    assert isinstance(made, Rollout), made
    return made


FORMATS = {
    "ours": ("", (), "<tool:guess>5</tool>", "<tool:guess>7</tool>"),
    "hermes": (
        HERMES,
        (),
        '<tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>',
        '<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>',
    ),
    "llama3": (
        LLAMA3,
        (),
        '{"name": "guess", "parameters": {"number": 5}}',
        '{"name": "guess", "parameters": {"number": 7}}',
    ),
    "mistral": (
        MISTRAL,
        MISTRAL_CONTROLS,
        '[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 5}, "id": "a1B2c3D4e"}]',
        '[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 7}, "id": "f5G6h7I8j"}]',
    ),
}
# What the policy reads after its first and its second call, in the words of each template.
READ = {
    "ours": ("\n<|im_start|>tool\nhigher<|im_end|>\n<|im_start|>assistant\n", 'right "!"'),
    "hermes": (
        "\n<|im_start|>user\n<tool_response>\nhigher\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        'right "!"',
    ),
    "llama3": ('<|im_start|>ipython\n"higher"<|im_end|><|im_start|>assistant\n', 'right \\"!\\"'),
    "mistral": ('[TOOL_RESULTS] {"content": higher, "call_id": "a1B2c3D4e"}[/TOOL_RESULTS]', 'right "!"'),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_game_is_played_in_the_models_own_format_token_for_token(
    form: str, tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    template, controls, low, right = FORMATS[form]
    own = with_template(tokenizer, template, *controls) if template else tokenizer
    (asked,) = make_prompts("p")
    script = {"p": low, "p/0/1": right, "p/0/2": "It is 7."}
    ((made,),) = play(own, [asked], script)
    rollout = rollout_of(made)
    assert (rollout.text, rollout.finish_reason, rollout.environment_reward) == ("It is 7.", "stop", 0.5)
    assert [call.tool for call in rollout.tool_calls] == ["guess", "guess"]
    said = [rollout.completion_ids[start:end] for start, end in rollout.turns]
    assert said == [own.encode(text, "template") + own.end_of_turn for text in script.values()]
    gaps = [rollout.completion_ids[a:b] for (_, a), (b, _) in zip(rollout.turns, rollout.turns[1:], strict=False)]
    first, second = (own.hf_tokenizer.decode(list(ids), skip_special_tokens=False) for ids in gaps)
    assert first == READ[form][0]
    assert READ[form][1] in second
    mask_canary([rollout], own.eos_ids)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_the_chat_template_declares_the_tools_and_the_same_tokens_are_rendered_again(
    form: str, tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    template, controls, _, _ = FORMATS[form]
    own = with_template(tokenizer, template, *controls)
    ((made,),) = play(own, make_prompts("p"), {"p": "7"})
    prompt = rollout_of(made).prompt
    read = own.hf_tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    assert '"name": "guess"' in read and "Says whether your guess is right" in read
    assert own.render_prompt(prompt.messages, tools=prompt.tools) == prompt.token_ids


def test_without_a_format_of_the_template_nothing_is_declared(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    (asked,) = make_prompts("p")
    ((made,),) = play(tokenizer, [asked], {"p": "7"})
    assert made.prompt is asked


def test_tools_of_the_table_are_called_in_the_models_format_beside_the_environments(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    own = with_template(tokenizer, HERMES)
    call = '<tool_call>{"name": "calculator", "arguments": {"argument": "3+4"}}</tool_call>'
    script = {"p": call, "p/0/1": FORMATS["hermes"][3], "p/0/2": "7"}
    ((made,),) = play(own, make_prompts("p"), script, tools=[CalculatorTool()])
    assert [call.output for call in rollout_of(made).tool_calls] == ["7", 'right "!"']
    assert rollout_of(made).environment_reward == 1.0


def test_a_tool_of_the_table_with_the_name_of_a_method_is_refused(tokenizer: ChatTokenizer) -> None:
    class Guesses(CalculatorTool):
        name = "guess"

    with pytest.raises(ConfigError, match="'guess' is both a tool and a method of the environment"):
        play(tokenizer, [], {}, tools=[Guesses()])


def test_the_first_observation_ends_the_prompts_last_message(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    ((made,),) = play(tokenizer, make_prompts("p"), {"p": "7"}, start="From 1 to 9.")
    assert made.prompt.messages[-1].content == "p\n\nFrom 1 to 9."
    assert made.prompt.token_ids == tokenizer.render_prompt(made.prompt.messages)


def test_what_is_added_to_a_prompt_counts_for_max_new_tokens(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    # Two line ends and twelve bytes are added: 14 tokens, which leave 100 of 114 for a first turn.
    room = dataclasses.replace(PARAMS, max_new_tokens=114)
    ((made,),) = play(tokenizer, make_prompts("p"), {"p": "7"}, start="From 1 to 9.", params=room)
    assert rollout_of(made).text == "7"
    with pytest.raises(SamplingError, match="take 14 tokens of max_new_tokens = 113"):
        less = dataclasses.replace(PARAMS, max_new_tokens=113)
        play(tokenizer, make_prompts("p"), {"p": "7"}, start="From 1 to 9.", params=less)


def test_a_group_whose_episodes_begin_differently_is_refused(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    two = dataclasses.replace(PARAMS, num_samples=2)
    with pytest.raises(SamplingError, match="begins the episodes of prompt 'unseeded' differently"):
        play(tokenizer, make_prompts("unseeded"), {"unseeded": "7"}, params=two)


def test_an_environment_that_fails_costs_its_rollout_and_of_more_than_a_tenth_stops_the_run(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    names = [*"abcdefghi", "broken"]
    groups = play(tokenizer, make_prompts(*names), dict.fromkeys(names, "7"))
    assert isinstance(groups[-1][0], FailedRollout) and "no board" in groups[-1][0].reason
    assert all(isinstance(made, Rollout) for (made,) in groups[:-1])
    with pytest.raises(SamplingError, match="raised in 1 of 9 episodes"):
        play(tokenizer, make_prompts(*names[1:]), dict.fromkeys(names, "7"))


class Forgetful(ScriptedSampler):
    """An engine that reads a history as something else."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        groups = super().sample(prompts, params, seed=seed, places=places)
        asked = [dataclasses.replace(prompt, token_ids=prompt.token_ids[1:]) for prompt in prompts]
        return [
            [dataclasses.replace(each, prompt=prompt) for each in group]
            for group, prompt in zip(groups, asked, strict=True)
        ]


def test_an_engine_that_read_other_tokens_than_the_episodes_is_refused(
    tokenizer: ChatTokenizer, make_prompts: Callable[..., list[Prompt]]
) -> None:
    engine = Forgetful.from_texts({"p": ["<tool:guess>5</tool>"], "p/0/1": ["7"]}, tokenizer)
    sampler = EpisodeSampler(engine, tokenizer, [], CONFIG, wrap_environment(Guess, {}))
    with pytest.raises(SamplingError, match="the engine did not read the tokens of the episode"):
        sampler.sample(make_prompts("p"), PARAMS, seed=0)
