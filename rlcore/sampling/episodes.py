"""Multi-turn episodes on any rollout engine: the policy writes a turn, a tool answers, the policy continues.

    prompt | turn, EOS | output in the template's words | turn, EOS | output | turn, EOS
             trained     read, not trained                trained     read     trained

All episodes of a batch advance together, and those that have ended leave it. What the engine sampled is kept as it is:
the next turn's input is the very token ids so far. An episode ends with a turn that is no call
(:func:`rlcore.tools.base.parse_call`), or is cut (finish reason ``length``) by the limit of a turn's tokens, of turns,
or of all tokens. It never ends with a tool's output. Every turn reads its whole history again (the engine's prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlcore.chat_template import template_pieces
from rlcore.config import EpisodeConfig
from rlcore.errors import ModelError, SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.tokenization import ChatTokenizer
from rlcore.tools.base import ParsedCall, Tool, ToolFailure, ToolOutput, error_output, parse_call
from rlcore.types import FailedRollout, Prompt, Role, Rollout, ToolCall

CUT = " [cut]"  # stands at the end of tool output that was longer than the limit
_Key = tuple[int, int]  # which prompt, which sample


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a tool said: as token ids with the template around it, and as the record of the call."""

    token_ids: tuple[int, ...]
    call: ToolCall


class EpisodeSampler:
    """Episodes with tools on an engine of any kind; see :class:`rlcore.sampling.base.Sampler`.

    ``params.max_new_tokens`` bounds an episode: its turns and the tools' output together. The draws of a turn are
    decided by the seed, the prompt's place, the sample's number and the turn, never by the other episodes.
    """

    def __init__(self, engine: Sampler, tokenizer: ChatTokenizer, tools: Sequence[Tool], config: EpisodeConfig) -> None:
        """
        Raises:
            ModelError: the chat template cannot show a message of ``config.tool_role`` after an assistant's.
        """
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._tools = {tool.name: tool for tool in tools}
        self._before, self._after = reply_frame(tokenizer, config.tool_role)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine serves."""
        return self._engine.policy_version

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
            SamplingError: the engine is broken, or a tool answered another number of calls than it was asked.
        """
        numbers = list(range(len(prompts)) if places is None else places)
        turn_params = replace(params, max_new_tokens=min(self._config.max_turn_tokens, params.max_new_tokens))
        groups = self._engine.sample(prompts, turn_params, seed=seed, places=numbers)
        made = {(i, j): item for i, group in enumerate(groups) for j, item in enumerate(group)}
        live = _sound(made)
        for turn in range(1, self._config.max_turns):
            answered = self._answer(live, room=params.max_new_tokens - turn_params.max_new_tokens)
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
        return [[_ended(made[i, j]) for j in range(len(group))] for i, group in enumerate(groups)]

    def _answer(self, live: Mapping[_Key, Rollout], *, room: int) -> dict[_Key, Rollout | FailedRollout]:
        """The episodes whose last turn is a call, with its answer; where no room is left after that, none of it."""
        calls = {key: call for key, episode in live.items() if (call := _open_call(episode))}
        answered: dict[_Key, Rollout | FailedRollout] = {}
        for key, outcome in self._run(calls).items():
            episode, call = live[key], calls[key]
            if isinstance(outcome, ToolFailure):
                answered[key] = FailedRollout(prompt=episode.prompt, reason=f"{call.tool}: {outcome.reason}")
                continue
            reply = self._reply(episode.text, call, outcome)
            if len(episode.completion_ids) + len(reply.token_ids) <= room:
                answered[key] = _with_reply(episode, reply)
        return answered

    def _run(self, calls: Mapping[_Key, ParsedCall]) -> dict[_Key, ToolOutput | ToolFailure]:
        """The answer to each call; every tool is asked once, for all of its calls."""
        answers: dict[_Key, ToolOutput | ToolFailure] = {
            key: error_output(call.fault or f"there is no tool {call.tool!r}, only {', '.join(self._tools)}")
            for key, call in calls.items()
            if call.tool not in self._tools
        }
        for name, tool in self._tools.items():
            keys = [key for key, call in calls.items() if call.tool == name]
            outcomes = tool([calls[key].argument for key in keys]) if keys else []
            if len(outcomes) != len(keys):
                raise SamplingError(f"the tool {name!r} gave {len(outcomes)} answers to {len(keys)} calls")
            answers |= zip(keys, outcomes, strict=True)
        return answers

    def _reply(self, turn: str, call: ParsedCall, output: ToolOutput) -> _Reply:
        limit = self._config.max_output_tokens
        try:
            ids = self._tokenizer.encode(output.text)
        except ModelError:  # a rare tokenizer makes control tokens of plain text
            output = error_output("the output cannot be shown")
            ids = self._tokenizer.encode(output.text)
        if len(ids) > limit:
            mark = self._tokenizer.encode(CUT)
            ids = ids[: limit - len(mark)] + mark
        shown = ToolCall(text=turn, tool=call.tool, output=self._tokenizer.decode(ids), is_error=output.is_error)
        return _Reply(token_ids=self._before + ids + self._after, call=shown)


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Turns, calls, errors and tool tokens of a batch of episodes, by their names in the glossary; all 0 for none."""
    calls = [call for rollout in rollouts for call in rollout.tool_calls]
    num_tokens = sum(len(rollout.loss_mask) for rollout in rollouts)
    num_own = sum(sum(rollout.loss_mask) for rollout in rollouts)
    count = max(1, len(rollouts))
    return {
        "episode/turns": sum(len(rollout.turns) for rollout in rollouts) / count,
        "episode/with_calls": sum(bool(rollout.tool_calls) for rollout in rollouts) / count,
        "episode/tool_calls": len(calls) / count,
        "episode/tool_errors": sum(call.is_error for call in calls) / max(1, len(calls)),
        "episode/tool_tokens": (num_tokens - num_own) / max(1, num_tokens),
    }


def reply_frame(tokenizer: ChatTokenizer, role: Role) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of what the template writes after an assistant's EOS and before a message of ``role``, and after it.

    Raises:
        ModelError: the template refuses such a conversation.
    """
    pieces = template_pieces(tokenizer.backend, ["user", "assistant", role])
    before, after = map(tokenizer.encode_template, pieces[2:])
    end = next((place for place, number in enumerate(before) if number in tokenizer.eos_ids), -1)
    return before[end + 1 :], after


def _sound(made: Mapping[_Key, Rollout | FailedRollout]) -> dict[_Key, Rollout]:
    return {key: item for key, item in made.items() if isinstance(item, Rollout)}


def _open_call(episode: Rollout) -> ParsedCall | None:
    """The call that an episode waits for. A turn that was cut by its limit is not a call, however it ends."""
    return parse_call(episode.text) if episode.finish_reason == "stop" else None


def _with_reply(rollout: Rollout, reply: _Reply) -> Rollout:
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
    """An episode with its next turn; the oldest weights that had a part in it give its version."""
    if isinstance(turn, FailedRollout):
        return FailedRollout(prompt=episode.prompt, reason=turn.reason)
    return replace(
        episode,
        completion_ids=episode.completion_ids + turn.completion_ids,
        sampler_logprobs=episode.sampler_logprobs + turn.sampler_logprobs,
        loss_mask=episode.loss_mask + turn.loss_mask,
        policy_version=min(episode.policy_version, turn.policy_version),
        finish_reason=turn.finish_reason,
        text=turn.text,
    )


def _ended(made: Rollout | FailedRollout) -> Rollout | FailedRollout:
    """A call that found no turn or no token left to be answered in was cut by the limit."""
    return replace(made, finish_reason="length") if isinstance(made, Rollout) and _open_call(made) else made
