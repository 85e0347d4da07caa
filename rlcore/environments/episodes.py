"""Multi-turn episodes on any rollout engine: the policy writes a turn, a tool answers, the policy continues.

    prompt | turn, EOS | output in the template's words | turn, EOS | output | turn, EOS
             trained     read, not trained                trained     read     trained

All episodes of a batch advance together, and ended ones leave it. Sampled tokens are never re-encoded: the input of the
next turn is exactly the token ids so far. An episode ends with a turn without a call, or is truncated (finish reason
``length``) by the limit of tokens per turn, of turns, or of all tokens. It never ends with tool output. Tools are those
of :mod:`rlcore.environments.table`, an environment's methods, or both.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlcore.config import EpisodeConfig
from rlcore.environments.base import ParsedCall, Tool, ToolFailure, ToolOutput, error_output, format_of
from rlcore.environments.environment import MAX_FAILURES, EnvironmentClass, EnvironmentPool, episode_seeds
from rlcore.environments.tool_output_template import make_tool_output_template, refuse_control_tokens, writes_tools
from rlcore.errors import ConfigError, ModelError, SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.text.text_parts import Ids
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout, ToolCall

TRUNCATED_REPLY = " [cut]"  # marks truncated tool output


class EpisodeSampler:
    """Sampler of episodes with tools on any engine; see :class:`rlcore.sampling.base.Sampler`.

    ``params.max_new_tokens`` bounds an episode: its turns, tool output, and the tool declarations and first observation
    that are added to the prompt. Random numbers depend on the seed, the prompt's index, the sample's index and the
    turn, not on other episodes.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: ChatTokenizer,
        tools: Sequence[Tool],
        config: EpisodeConfig,
        environment: EnvironmentClass | None = None,
    ) -> None:
        """Create the sampler.

        Raises:
            ConfigError: A tool of the table has the name of an environment's method, or a tool's description has a
                control token.
            ModelError: The chat template cannot show a message of ``config.tool_role`` after an assistant's.
        """
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._tools = {tool.name: tool for tool in tools}
        self._environment = environment
        methods = environment.schemas if environment else {}
        for name in self._tools.keys() & methods.keys():
            raise ConfigError(f"{name!r} is both a tool and a method of the environment", fix="rename the method")
        self._names = (*self._tools, *methods)
        self._format = format_of(str(tokenizer.hf_tokenizer.get_chat_template()), config.call_format)
        schemas = json.dumps([*map(tool_schema, tools), *methods.values()])
        self._declared = schemas if self._format.is_of_model and writes_tools(tokenizer, schemas) else ""
        refuse_control_tokens(tokenizer, self._declared)
        self._frame = make_tool_output_template(tokenizer, config.tool_role, self._format, tools=self._declared)

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def changes_prompts(self) -> bool:
        """True if the policy reads more than the prompts: tool declarations, or a first observation."""
        return bool(self._declared or self._environment)

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._engine.load_weights(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        return self._engine.logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        return self._engine.differing_parts(state)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of episodes per prompt.

        Raises:
            SamplingError: The engine is broken, a tool returned a wrong number of answers, the environment fails in
                over a tenth of the episodes or begins those of a group differently, or the first turn has no room.
        """
        numbers = list(range(len(prompts)) if places is None else places)
        if self._environment is None:
            opening = open_episodes(self._tokenizer, prompts, tools=self._declared)
            return self._play(opening, params, seed=seed, numbers=numbers, environments=None)
        with closing(EnvironmentPool(self._environment, timeout_seconds=self._config.timeout_seconds)) as environments:
            opening = open_episodes(
                self._tokenizer,
                prompts,
                tools=self._declared,
                environments=environments,
                numbers=numbers,
                num_samples=params.num_samples,
                seed=seed,
            )
            groups = assign_rewards(
                environments, self._play(opening, params, seed=seed, numbers=numbers, environments=environments)
            )
        made = [each for group in groups for each in group]
        failed = [each.reason for each in made if isinstance(each, FailedRollout)]
        check_failures([reason for reason in failed if self._environment.name in reason], len(made))
        return groups

    def _play(
        self,
        opening: EpisodePrompts,
        params: SamplingParams,
        *,
        seed: int,
        numbers: Sequence[int],
        environments: EnvironmentPool | None,
    ) -> list[list[Rollout | FailedRollout]]:
        turn_params = replace(params, max_new_tokens=min(self._config.max_turn_tokens, params.max_new_tokens))
        rooms = [params.max_new_tokens - grown - turn_params.max_new_tokens for grown in opening.num_added_tokens]
        if min(rooms, default=0) < 0:
            raise SamplingError(
                f"tool declarations and the first observation take {max(opening.num_added_tokens)} tokens of "
                f"max_new_tokens = {params.max_new_tokens}, which leaves no room for a turn",
                fix="raise sampling.max_new_tokens, and evaluation.max_new_tokens with it",
            )
        groups = self._engine.sample(opening.prompts, turn_params, seed=seed, places=numbers)
        made = {(i, j): item for i, group in enumerate(groups) for j, item in enumerate(group)} | opening.failed
        live = _completed(made)
        for turn in range(1, self._config.max_turns):
            answered = self._answer(live, rooms, environments)
            waiting = _completed(answered)
            made |= {key: item for key, item in answered.items() if key not in waiting}
            if not waiting:
                break
            turns = self._engine.sample(
                [_history(episode, f"{j}/{turn}") for (_, j), episode in waiting.items()],
                replace(turn_params, num_samples=1),
                seed=derive_seed(seed, "turn", turn),
                places=[derive_seed(numbers[i], j) for i, j in waiting],
            )
            joined = {key: _joined(waiting[key], new) for key, (new,) in zip(waiting, turns, strict=True)}
            made, live = made | joined, _completed(joined)
        return [[self._ended(made[i, j]) for j in range(len(group))] for i, group in enumerate(groups)]

    def _answer(
        self, live: Mapping[Key, Rollout], rooms: Sequence[int], environments: EnvironmentPool | None
    ) -> dict[Key, Rollout | FailedRollout]:
        calls = {key: call for key, episode in live.items() if (call := self._open_call(episode))}
        answered: dict[Key, Rollout | FailedRollout] = {}
        for key, outcome in self._run(calls, environments).items():
            episode, call = live[key], calls[key]
            if isinstance(outcome, ToolFailure):
                answered[key] = FailedRollout(prompt=episode.prompt, reason=f"{call.tool}: {outcome.reason}")
                continue
            ids, record = self._reply(episode.text, call, outcome)
            if len(episode.completion_ids) + len(ids) <= rooms[key[0]]:
                answered[key] = _with_reply(episode, ids, record)
        return answered

    def _run(
        self, calls: Mapping[Key, ParsedCall], environments: EnvironmentPool | None
    ) -> dict[Key, ToolOutput | ToolFailure]:
        answers: dict[Key, ToolOutput | ToolFailure] = {
            key: error_output(call.error or f"there is no tool {call.tool!r}, only {', '.join(self._names)}")
            for key, call in calls.items()
            if call.tool not in self._names
        }
        for name, tool in self._tools.items():
            texts = {key: text_argument(call) for key, call in calls.items() if call.tool == name}
            answers |= {key: text for key, text in texts.items() if isinstance(text, ToolOutput)}
            pending = {key: text for key, text in texts.items() if isinstance(text, str)}
            outcomes = tool(list(pending.values())) if pending else []
            if len(outcomes) != len(pending):
                raise SamplingError(f"the tool {name!r} returned {len(outcomes)} answers to {len(pending)} calls")
            answers |= zip(pending, outcomes, strict=True)
        if environments:
            answers |= environments.answer({key: call for key, call in calls.items() if key not in answers})
        return {key: answers[key] for key in calls}

    def _reply(self, turn: str, call: ParsedCall, output: ToolOutput) -> tuple[Ids, ToolCall]:
        try:
            text = self._truncate(output.text)
            ids = self._frame.reply(text, call.call_id)
        except ModelError:  # some tokenizers make control tokens of plain text
            output = error_output("the output cannot be shown")
            text = self._truncate(output.text)
            ids = self._frame.reply(text, call.call_id)
        tool = call.tool if call.tool in self._names else ""  # unknown names are not tools
        return ids, ToolCall(text=turn, tool=tool, output=text, is_error=output.is_error)

    def _truncate(self, output: str) -> str:
        limit, ids = self._config.max_tool_output_tokens, self._tokenizer.encode(output)
        if len(ids) <= limit:
            return output
        kept = self._tokenizer.encoder.spell(ids[: limit - len(self._tokenizer.encode(TRUNCATED_REPLY))])
        return kept.rstrip("\ufffd") + TRUNCATED_REPLY  # drops an incomplete character

    def _open_call(self, episode: Rollout) -> ParsedCall | None:
        """Return the unanswered call of an episode. A truncated turn is not a call."""
        turn = self._tokenizer.prefill + self._last_turn(episode)  # a thought that the prompt begins holds no call
        return self._format.parse(turn) if episode.finish_reason == "stop" else None

    def _last_turn(self, episode: Rollout) -> str:
        """Return the text of the last turn, with the mark of a call if that is a control token."""
        if self._format.mark not in self._tokenizer.special_tokens:
            return episode.text
        start, end = episode.turns[-1]
        ids = [number for number in episode.completion_ids[start:end] if number not in self._tokenizer.eos_ids]
        text: str = self._tokenizer.hf_tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _ended(self, made: Rollout | FailedRollout) -> Rollout | FailedRollout:
        """Mark an episode as truncated if its last call has no turn or token left for an answer."""
        is_open = isinstance(made, Rollout) and self._open_call(made) is not None
        return replace(made, finish_reason="length") if is_open and isinstance(made, Rollout) else made


def _completed(made: Mapping[Key, Rollout | FailedRollout]) -> dict[Key, Rollout]:
    return {key: item for key, item in made.items() if isinstance(item, Rollout)}


def _with_reply(rollout: Rollout, ids: Ids, call: ToolCall) -> Rollout:
    return replace(
        rollout,
        completion_ids=rollout.completion_ids + ids,
        sampler_logprobs=rollout.sampler_logprobs + (0.0,) * len(ids),
        loss_mask=rollout.loss_mask + (False,) * len(ids),
        tool_calls=(*rollout.tool_calls, call),
    )


def _history(episode: Rollout, name: str) -> Prompt:
    prompt = episode.prompt
    return replace(prompt, prompt_id=f"{prompt.prompt_id}/{name}", token_ids=prompt.token_ids + episode.completion_ids)


def _joined(episode: Rollout, turn: Rollout | FailedRollout) -> Rollout | FailedRollout:
    """Append the next turn to an episode. Its version is the oldest of its turns."""
    if isinstance(turn, FailedRollout):
        return FailedRollout(prompt=episode.prompt, reason=turn.reason)
    if turn.prompt.token_ids != episode.prompt.token_ids + episode.completion_ids:
        raise SamplingError(f"the engine did not read the tokens of the episode: {turn.prompt.prompt_id!r}")
    return replace(
        episode,
        completion_ids=episode.completion_ids + turn.completion_ids,
        sampler_logprobs=episode.sampler_logprobs + turn.sampler_logprobs,
        loss_mask=episode.loss_mask + turn.loss_mask,
        policy_version=min(episode.policy_version, turn.policy_version),
        finish_reason=turn.finish_reason,
        text=turn.text,
    )


ARGUMENT = "argument"


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the tool's JSON schema. The description is the tool's ``describes``, or its class's docstring."""
    words = getattr(tool, "describes", "") or inspect.getdoc(type(tool)) or tool.name
    argument = {"type": "string", "description": "What the tool is given, as plain text."}
    parameters = {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT]}
    return {"type": "function", "function": {"name": tool.name, "description": words, "parameters": parameters}}


def text_argument(call: ParsedCall) -> str | ToolOutput:
    """Return the text argument of a call, or the error of the call."""
    if call.arguments is None:
        return call.argument
    text = call.arguments.get(ARGUMENT)
    if set(call.arguments) != {ARGUMENT} or not isinstance(text, str):
        return error_output(f"{call.tool}: the arguments are a JSON object with one text, {ARGUMENT!r}")
    return text


Key = tuple[int, int]  # index of the prompt and of the sample
_PREFIX = "the environment: "


@dataclass(frozen=True, kw_only=True)
class EpisodePrompts:
    """Prompts as the policy reads them, the number of tokens added to each, and the episodes that could not begin."""

    prompts: list[Prompt]
    num_added_tokens: list[int]
    failed: dict[Key, FailedRollout] = field(default_factory=dict)


def open_episodes(
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    *,
    tools: str,
    environments: EnvironmentPool | None = None,
    numbers: Sequence[int] = (),
    num_samples: int = 0,
    seed: int = 0,
) -> EpisodePrompts:
    """Add the tool declarations and the first observation to the prompts.

    Raises:
        SamplingError: An environment begins episodes of a group differently, or fails in over a tenth of them.
        ModelError: The template cannot write a prompt with tools.
    """
    if environments is None and not tools:
        return EpisodePrompts(prompts=list(prompts), num_added_tokens=[0] * len(prompts))
    keys = [(i, j) for i in range(len(prompts)) for j in range(num_samples if environments else 0)]
    seeds = {(i, j): episode_seeds(seed, numbers[i], j) for i, j in keys}
    starts = environments.reset({key: prompts[key[0]] for key in keys}, seeds) if environments else {}
    failed = {
        key: FailedRollout(prompt=prompts[key[0]], reason=_PREFIX + start.reason)
        for key, start in starts.items()
        if isinstance(start, ToolFailure)
    }
    check_failures([each.reason for each in failed.values()], len(keys))  # before sampling
    opened = []
    for i, prompt in enumerate(prompts):
        first = {start for j in range(num_samples) if isinstance(start := starts.get((i, j), ""), str)}
        if len(first) > 1:
            raise SamplingError(
                f"the environment begins the episodes of prompt {prompt.prompt_id!r} differently: {sorted(first)[:2]}",
                fix="a group has one prompt: in reset, use only random numbers of its argument rng",
            )
        opened.append(_opened(tokenizer, prompt, "".join(first), tools))
    num_added_tokens = [len(new.token_ids) - len(old.token_ids) for new, old in zip(opened, prompts, strict=True)]
    return EpisodePrompts(prompts=opened, num_added_tokens=num_added_tokens, failed=failed)


def assign_rewards(
    environments: EnvironmentPool, groups: Sequence[Sequence[Rollout | FailedRollout]]
) -> list[list[Rollout | FailedRollout]]:
    """Return the episodes with the environment's rewards."""
    keys = [(i, j) for i, group in enumerate(groups) for j, made in enumerate(group) if isinstance(made, Rollout)]
    rewards = environments.rewards(keys)
    return [[_with_reward(made, rewards.get((i, j))) for j, made in enumerate(group)] for i, group in enumerate(groups)]


def check_failures(reasons: Sequence[str], count: int) -> None:
    """Stop if the environment, not the policy, fails too often. ``count`` is the number of episodes.

    Raises:
        SamplingError: More than a tenth of the episodes failed; has the first reason.
    """
    if len(reasons) > MAX_FAILURES * count:
        raise SamplingError(
            f"environment raised in {len(reasons)} of {count} episodes (limit {MAX_FAILURES:.0%}): {reasons[0]}",
            fix="repair the environment; raise rlcore.environments.base.CallError for wrong calls of the policy",
        )


def _opened(tokenizer: ChatTokenizer, prompt: Prompt, observation: str, tools: str) -> Prompt:
    if not observation and not tools:
        return prompt
    messages = prompt.messages
    if observation:
        last = messages[-1]
        messages = (*messages[:-1], replace(last, content=f"{last.content}\n\n{observation}"))
    ids = tokenizer.render_prompt(messages, tools=tools)
    return replace(prompt, messages=messages, token_ids=ids, tools=tools)


def _with_reward(made: Rollout | FailedRollout, reward: float | ToolFailure | None) -> Rollout | FailedRollout:
    if isinstance(reward, ToolFailure):
        return FailedRollout(prompt=made.prompt, reason=_PREFIX + reward.reason)
    return replace(made, environment_reward=reward) if isinstance(made, Rollout) else made
