"""Multi-turn episodes on any rollout engine: the policy writes a turn, a tool answers, the policy continues.

    prompt | turn, EOS | output in the template's words | turn, EOS | output | turn, EOS
             trained     read, not trained                trained     read     trained

All episodes of a batch advance together, and those that have ended leave it. What the engine sampled is kept as it is:
the next turn's input is the very token ids so far, and an engine that has read others is refused. An episode ends with
a turn that is no call (``call_formats``), or is cut (finish reason ``length``) by the limit of a turn's
tokens, of turns, or of all tokens. It never ends with a tool's output. Every turn reads its whole history again (the
engine's prefill). Tools are those of :mod:`rlcore.environments.table`, an environment's methods, or both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from rlcore.config import EpisodeConfig
from rlcore.environments.base import ParsedCall, Tool, ToolFailure, ToolOutput, error_output
from rlcore.environments.call_formats import format_of
from rlcore.environments.environment import EnvironmentClass
from rlcore.environments.environment_pool import EnvironmentPool
from rlcore.environments.episode_setup import (
    EpisodePrompts,
    Key,
    assign_rewards,
    check_failures,
    failures_of,
    open_episodes,
)
from rlcore.environments.tool_output_template import make_tool_output_template, refuse_control_tokens, writes_tools
from rlcore.environments.tool_schemas import text_argument, tool_schema
from rlcore.errors import ConfigError, ModelError, SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout, ToolCall

TRUNCATED_REPLY = " [cut]"  # stands at the end of tool output that was longer than the limit


@dataclass(frozen=True, slots=True)
class _ToolReply:
    """What a tool said: as token ids with the template around it, and as the record of the call."""

    token_ids: tuple[int, ...]
    call: ToolCall


class EpisodeSampler:
    """Episodes with tools on an engine of any kind; see :class:`rlcore.sampling.base.Sampler`.

    ``params.max_new_tokens`` bounds an episode: its turns, the tools' output, and what the declaration of the tools and
    the first observation add to its prompt. The draws of a turn are decided by the seed, the prompt's place, the
    sample's number and the turn, never by the other episodes.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: ChatTokenizer,
        tools: Sequence[Tool],
        config: EpisodeConfig,
        environment: EnvironmentClass | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: a tool of the table has the name of a method of the environment, or the description of a tool
                has a control token.
            ModelError: the chat template cannot show a message of ``config.tool_role`` after an assistant's.
        """
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._tools = {tool.name: tool for tool in tools}
        self._environment = environment
        methods = environment.schemas if environment else {}
        for name in self._tools.keys() & methods.keys():
            raise ConfigError(f"{name!r} is a tool and a method of the environment too", fix="rename the method")
        self._names = (*self._tools, *methods)
        self._format = format_of(str(tokenizer.hf_tokenizer.get_chat_template()), config.call_format)
        schemas = json.dumps([*map(tool_schema, tools), *methods.values()])
        self._declared = schemas if self._format.is_own and writes_tools(tokenizer, schemas) else ""
        refuse_control_tokens(tokenizer, self._declared)
        self._frame = make_tool_output_template(tokenizer, config.tool_role, self._format, tools=self._declared)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine serves."""
        return self._engine.policy_version

    @property
    def changes_prompts(self) -> bool:
        """Whether the policy reads more than the prompts: declared tools, or an environment's first observation."""
        return bool(self._declared or self._environment)

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Hand the weights to the engine; raises what it raises."""
        self._engine.load_weights(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """The engine's log-probability of each completion token, tool output included."""
        return self._engine.logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """The parts in which the engine differs."""
        return self._engine.differing_parts(state)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """A group of episodes per prompt.

        A call that the tool itself could not serve makes a failed rollout; a call that is wrong gets an error message.

        Raises:
            SamplingError: the engine is broken, a tool answered another number of calls than it was asked, the
                environment fails more than a tenth of the episodes or begins those of a group differently, or the
                first turn has no room.
        """
        numbers = list(range(len(prompts)) if places is None else places)
        if self._environment is None:
            opening = open_episodes(self._tokenizer, prompts, tools=self._declared)
            return self._play(opening, params, seed=seed, numbers=numbers, worlds=None)
        with closing(EnvironmentPool(self._environment, timeout_seconds=self._config.timeout_seconds)) as worlds:
            opening = open_episodes(
                self._tokenizer,
                prompts,
                tools=self._declared,
                worlds=worlds,
                numbers=numbers,
                num_samples=params.num_samples,
                seed=seed,
            )
            groups = assign_rewards(worlds, self._play(opening, params, seed=seed, numbers=numbers, worlds=worlds))
        check_failures(failures_of(self._environment.name, groups), sum(map(len, groups)))
        return groups

    def _play(
        self,
        opening: EpisodePrompts,
        params: SamplingParams,
        *,
        seed: int,
        numbers: Sequence[int],
        worlds: EnvironmentPool | None,
    ) -> list[list[Rollout | FailedRollout]]:
        turn_params = replace(params, max_new_tokens=min(self._config.max_turn_tokens, params.max_new_tokens))
        rooms = [params.max_new_tokens - grown - turn_params.max_new_tokens for grown in opening.num_added_tokens]
        if min(rooms, default=0) < 0:
            raise SamplingError(
                f"the declared tools and the first observation take {max(opening.num_added_tokens)} tokens of "
                f"max_new_tokens = {params.max_new_tokens}, which leaves no room for a turn",
                fix="raise sampling.max_new_tokens, and evaluation.max_new_tokens with it",
            )
        groups = self._engine.sample(opening.prompts, turn_params, seed=seed, places=numbers)
        made = {(i, j): item for i, group in enumerate(groups) for j, item in enumerate(group)} | opening.failed
        live = _sound(made)
        for turn in range(1, self._config.max_turns):
            answered = self._answer(live, rooms, worlds)
            waiting = _sound(answered)
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
            made, live = made | joined, _sound(joined)
        return [[self._ended(made[i, j]) for j in range(len(group))] for i, group in enumerate(groups)]

    def _answer(
        self, live: Mapping[Key, Rollout], rooms: Sequence[int], worlds: EnvironmentPool | None
    ) -> dict[Key, Rollout | FailedRollout]:
        """The episodes whose last turn is a call, with its answer; where no room is left after that, none of it."""
        calls = {key: call for key, episode in live.items() if (call := self._open_call(episode))}
        answered: dict[Key, Rollout | FailedRollout] = {}
        for key, outcome in self._run(calls, worlds).items():
            episode, call = live[key], calls[key]
            if isinstance(outcome, ToolFailure):
                answered[key] = FailedRollout(prompt=episode.prompt, reason=f"{call.tool}: {outcome.reason}")
                continue
            reply = self._reply(episode.text, call, outcome)
            if len(episode.completion_ids) + len(reply.token_ids) <= rooms[key[0]]:
                answered[key] = _with_reply(episode, reply)
        return answered

    def _run(
        self, calls: Mapping[Key, ParsedCall], worlds: EnvironmentPool | None
    ) -> dict[Key, ToolOutput | ToolFailure]:
        """The answer to each call; every tool is asked once, for all of its calls."""
        answers: dict[Key, ToolOutput | ToolFailure] = {
            key: error_output(call.error or f"there is no tool {call.tool!r}, only {', '.join(self._names)}")
            for key, call in calls.items()
            if call.tool not in self._names
        }
        for name, tool in self._tools.items():
            texts = {key: text_argument(call) for key, call in calls.items() if call.tool == name}
            answers |= {key: text for key, text in texts.items() if isinstance(text, ToolOutput)}
            asked = {key: text for key, text in texts.items() if isinstance(text, str)}
            outcomes = tool(list(asked.values())) if asked else []
            if len(outcomes) != len(asked):
                raise SamplingError(f"the tool {name!r} gave {len(outcomes)} answers to {len(asked)} calls")
            answers |= zip(asked, outcomes, strict=True)
        if worlds:
            answers |= worlds.answer({key: call for key, call in calls.items() if key not in answers})
        return {key: answers[key] for key in calls}

    def _reply(self, turn: str, call: ParsedCall, output: ToolOutput) -> _ToolReply:
        try:
            text = self._cut(output.text)
            ids = self._frame.reply(text, call.call_id)
        except ModelError:  # a rare tokenizer makes control tokens of plain text
            output = error_output("the output cannot be shown")
            text = self._cut(output.text)
            ids = self._frame.reply(text, call.call_id)
        tool = call.tool if call.tool in self._names else ""  # a name of nothing is no call of a tool
        return _ToolReply(token_ids=ids, call=ToolCall(text=turn, tool=tool, output=text, is_error=output.is_error))

    def _cut(self, output: str) -> str:
        """What a tool said, up to the limit of its tokens."""
        limit, ids = self._config.max_tool_output_tokens, self._tokenizer.encode(output)
        if len(ids) <= limit:
            return output
        kept = self._tokenizer.encoder.spell(ids[: limit - len(self._tokenizer.encode(TRUNCATED_REPLY))])
        return kept.rstrip("\ufffd") + TRUNCATED_REPLY  # half a character is none

    def _open_call(self, episode: Rollout) -> ParsedCall | None:
        """The call that an episode waits for. A turn that was cut by its limit is not a call, however it ends."""
        return self._format.parse(self._said(episode)) if episode.finish_reason == "stop" else None

    def _said(self, episode: Rollout) -> str:
        """The text of the last turn, with the mark of a call where that is a control token."""
        if self._format.mark not in self._tokenizer.special_tokens:
            return episode.text
        start, end = episode.turns[-1]
        ids = [number for number in episode.completion_ids[start:end] if number not in self._tokenizer.eos_ids]
        text: str = self._tokenizer.hf_tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _ended(self, made: Rollout | FailedRollout) -> Rollout | FailedRollout:
        """A call that found no turn or no token left to be answered in was cut by the limit."""
        is_open = isinstance(made, Rollout) and self._open_call(made) is not None
        return replace(made, finish_reason="length") if is_open and isinstance(made, Rollout) else made


def _sound(made: Mapping[Key, Rollout | FailedRollout]) -> dict[Key, Rollout]:
    return {key: item for key, item in made.items() if isinstance(item, Rollout)}


def _with_reply(rollout: Rollout, reply: _ToolReply) -> Rollout:
    count = len(reply.token_ids)
    return replace(
        rollout,
        completion_ids=rollout.completion_ids + reply.token_ids,
        sampler_logprobs=rollout.sampler_logprobs + (0.0,) * count,
        loss_mask=rollout.loss_mask + (False,) * count,
        tool_calls=(*rollout.tool_calls, reply.call),
    )


def _history(episode: Rollout, name: str) -> Prompt:
    """All that an episode has read and written, as a prompt under an id of its own."""
    prompt = episode.prompt
    return replace(prompt, prompt_id=f"{prompt.prompt_id}/{name}", token_ids=prompt.token_ids + episode.completion_ids)


def _joined(episode: Rollout, turn: Rollout | FailedRollout) -> Rollout | FailedRollout:
    """An episode with its next turn; the oldest weights that had a part in it give its version.

    Raises:
        SamplingError: the turn does not go on from the very tokens so far.
    """
    if isinstance(turn, FailedRollout):
        return FailedRollout(prompt=episode.prompt, reason=turn.reason)
    if turn.prompt.token_ids != episode.prompt.token_ids + episode.completion_ids:
        raise SamplingError(f"the engine has read other tokens than the episode's: {turn.prompt.prompt_id!r}")
    return replace(
        episode,
        completion_ids=episode.completion_ids + turn.completion_ids,
        sampler_logprobs=episode.sampler_logprobs + turn.sampler_logprobs,
        loss_mask=episode.loss_mask + turn.loss_mask,
        policy_version=min(episode.policy_version, turn.policy_version),
        finish_reason=turn.finish_reason,
        text=turn.text,
    )
