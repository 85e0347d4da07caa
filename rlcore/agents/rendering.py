"""Prompts of agents as token ids, for any conversation with calls, tools and thoughts, and sampled turns as agents see
them: up to a stop string, with the thought, content and calls in the text.

Control tokens in an agent's texts are replaced by placeholders before the chat template renders them, and become plain
text after it, so that an agent or a tool cannot write one.

The prompt after a sampled answer is the recorded token ids, followed by the template's text after the answer:

    recorded ids: prompt, answer, EOS  |  \\n<|im_start|>tool\\n42<|im_end|>\\n<|im_start|>assistant\\n
                                       |  tail

To find the tail, the conversation is rendered with a mark for every sampled answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from rlcore.agents.requests import OFFER, Turn, function_call
from rlcore.environments.base import CallFormat, ParsedCall, format_of, split_thought
from rlcore.environments.call_arguments import arguments_of
from rlcore.environments.tool_output_template import writes_tools
from rlcore.errors import ModelError, shown
from rlcore.openai_api.replies import FunctionCall
from rlcore.openai_api.requests import ApiError, Fields
from rlcore.text.chat_template import render_turns
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout

TOO_LONG = "context_length_exceeded"
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "?"}}, "required": ["x"]}
_TOOL = json.dumps([{"type": "function", "function": {"name": "f", "description": "?", "parameters": _SCHEMA}}])
_PRIVATE = ("\ue000", "\ue001", "\ue002", "\ue003")
_HELD = re.compile("\ue000(\\d+)\ue001")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_MOST_HIDDEN = 64  # tokens, single bytes, that the next one may hide
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields of response templates
_parsed = lru_cache(maxsize=1)(json.loads)  # one request has many answers


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptRenderer:
    """Renderer of prompts of up to ``max_tokens`` in the tokenizer's chat template."""

    tokenizer: ChatTokenizer
    max_tokens: int

    @cached_property
    def form(self) -> CallFormat:
        return format_of(str(self.tokenizer.hf_tokenizer.get_chat_template()))

    def root(self, turns: Sequence[Turn], tools: str) -> tuple[Ids, str]:
        """Return the token ids and the text of a prompt.

        Raises:
            ApiError: The chat template cannot write the conversation.
        """
        text = self._render(turns, tools)
        try:
            return self.tokenizer.encoder.encode(self._parts(text)), text
        except ModelError as error:
            raise _refusal(error) from error

    def tail(self, turns: Sequence[Turn], tools: str, *, answers: Sequence[int], before: str) -> tuple[Ids, str] | None:
        """Return the token ids after the last sampled answer, and the text of the whole prompt with marks.

        None if the template would write the recorded prompt ``before``, or the answer, differently. ``answers``: index
        of each sampled turn.

        Raises:
            ApiError: The chat template cannot write the conversation.
        """
        text, mark = self._render(turns, tools, answers), _mark(answers[-1])
        head, found, _ = text.partition(mark)
        after = text[text.rfind(mark) + len(mark) :]
        end = after.find(self._end)
        if not found or end < 0 or not _plain(head).startswith(_plain(before)):
            return None
        tail = self._parts(after[end + len(self._end) :])
        encode, closing = self.tokenizer.encoder.encode_all, Part(self._end, "template")
        try:
            start, whole = encode([[closing], [closing, *tail]])
        except ModelError as error:
            raise _refusal(error) from error
        return (whole[len(start) :], text) if whole[: len(start)] == start else None

    def _render(self, turns: Sequence[Turn], tools: str, answers: Collection[int] = ()) -> str:
        names = {call.call_id: call.name for turn in turns for call in turn.calls}
        messages = [self._message(turn, names, index if index in answers else None) for index, turn in enumerate(turns)]
        declared = json.dumps(self._held(json.loads(tools))) if tools and self._shows_tools else ""
        try:
            text = render_turns(self.tokenizer.hf_tokenizer, messages, add_generation_prompt=True, tools=declared)
        except Exception as error:  # a chat template is a program, which may fail at any message
            raise _refusal(error) from error
        if len(text) > (most := self.max_tokens * self._longest_token):  # tokenizing a megabyte takes seconds
            what = f"the prompt has {len(text)} characters, and {self.max_tokens} tokens have at most {most}"
            raise ApiError(400, what, code=TOO_LONG, param="messages")
        after = 0  # of what stands before: searching from the start each time takes seconds for thousands of messages
        for number, (turn, message) in enumerate(zip(turns, messages, strict=True), start=1):
            content = str(message["content"]).strip()
            forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
            places = ((text.find(form, start), form) for start in (after, 0) for form in forms)
            place, form = next((found for found in places if found[0] >= 0), (-1, ""))
            after = max(after, place + len(form))
            if turn.role != "assistant" and place < 0:
                what = f"the chat template drops or rewrites message {number} ({turn.role}): '{shown(turn.content)}'"
                raise ApiError(400, what, code="chat_template")
        return text

    def _message(self, turn: Turn, names: Mapping[str, str], index: int | None) -> dict[str, Any]:
        if turn.role == "tool":
            name = {"name": self._held(names[turn.call_id])} if turn.call_id in names else {}
            role = self._tool_role
            ids = {"tool_call_id": _template_id(turn.call_id)} if role == "tool" and self.writes_calls else {}
            return {"role": role, "content": self._held(turn.content), **(name if ids else {}), **ids}
        if turn.role != "assistant":
            return {"role": turn.role, "content": self._held(turn.content)}
        if index is not None:
            calls = [FunctionCall(name=_mark(index), arguments="{}", call_id=call.call_id) for call in turn.calls]
            return self._assistant(_mark(index), calls)
        calls = [
            FunctionCall(name=self._held(call.name), arguments=call.arguments, call_id=call.call_id)
            for call in turn.calls
        ]
        message = self._assistant(self._held(turn.content, is_own=True), calls)
        thought = {"reasoning_content": self._held(turn.thought, is_own=True)} if turn.thought else {}
        return message | thought

    def _assistant(self, content: str, calls: Sequence[FunctionCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls and self.writes_calls:
            message["tool_calls"] = [
                {
                    "id": _template_id(call.call_id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._held(json.loads(call.arguments))},
                }
                for call in calls
            ]
        elif calls:
            written = [f"<tool:{call.name}>{self._held(call.arguments)}</tool>" for call in calls]
            message["content"] = "\n".join(filter(None, (content, *written)))
        return message

    @cached_property
    def writes_calls(self) -> bool:
        """True if the chat template has a format of calls; other models write calls in rlcore's format."""
        own = getattr(self.tokenizer.hf_tokenizer, "response_template", None)
        return self.form.is_of_model or own is not None

    @cached_property
    def _shows_tools(self) -> bool:
        return self.writes_calls and writes_tools(self.tokenizer, _TOOL)

    @cached_property
    def _longest_token(self) -> int:
        """Length of the longest token. In alphabets of bytes, a character is one byte."""
        return max(map(len, self.tokenizer.hf_tokenizer.get_vocab()))

    @cached_property
    def _tool_role(self) -> str:
        if self.writes_calls:
            return "tool"
        turns = [{"role": role, "content": "?"} for role in ("user", "assistant", "tool")]
        try:
            render_turns(self.tokenizer.hf_tokenizer, turns, add_generation_prompt=True)
        except ModelError:
            return "user"
        return "tool"

    @cached_property
    def _end(self) -> str:
        end, tokenizer = self.tokenizer.turn.end, self.tokenizer
        spelled = [tokenizer.spell([number]) for number in tokenizer.eos_ids]
        return max((each for each in spelled if each and end.endswith(each)), key=len, default=end)

    @cached_property
    def _controls(self) -> tuple[str, ...]:
        return (*sorted(filter(None, self.tokenizer.encoder.controls), key=len, reverse=True), *_PRIVATE)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of what others, and the assistant, must not write. The assistant writes tags of thoughts."""
        own = [each for each in self._controls if each in self.tokenizer.special_tokens or each in _PRIVATE]
        others, assistant = (re.compile("|".join(map(re.escape, words))) for words in (self._controls, own))
        return others, assistant

    def _held(self, value: Any, *, is_own: bool = False) -> Any:
        if isinstance(value, str):
            pattern = self._patterns[is_own]
            return pattern.sub(lambda found: f"\ue000{self._controls.index(found.group())}\ue001", value)
        if isinstance(value, Mapping):
            return {self._held(key): self._held(each) for key, each in value.items()}
        return [self._held(each) for each in value] if isinstance(value, list) else value

    def _parts(self, text: str) -> list[Part]:
        pieces = _HELD.split(text)
        return [
            Part(self._controls[int(piece)], "other") if number % 2 else Part(piece, "template")
            for number, piece in enumerate(pieces)
        ]


def _mark(index: int) -> str:
    return f"\ue002{index}\ue003"


def _plain(text: str) -> str:
    """Return a prompt without empty or beginning thoughts, which templates write in the newest turn only."""
    return _OPEN_THOUGHT.sub("", _EMPTY_THOUGHT.sub("", text)).rstrip()


def _template_id(known: str) -> str:
    return known if _ID.fullmatch(known) else call_id(known)


def call_id(seed: str) -> str:
    """Return an id of nine letters and digits, the only form that all chat templates accept."""
    return hashlib.sha256(seed.encode()).hexdigest()[:9]


def _refusal(error: Exception) -> ApiError:
    what = error.what if isinstance(error, ModelError) else f"the chat template fails: {error!r}"
    return ApiError(400, shown(what, max_chars=500), code="chat_template")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReader:
    """Reader of sampled turns.

    Attributes:
        prefill: Thought that the generation prompt begins.
        parse: Parser of the tokenizer's own response template, from prompt, text and tools to a message, or None.
    """

    form: CallFormat
    prefill: str = ""
    parse: Callable[[str, str, Sequence[Any]], Mapping[str, Any]] | None = None

    def read(self, text: str, spelled: str, *, prompt: str, tools: str, seed: str) -> tuple[Turn, bool]:
        """Return a turn, and True if a call in it is malformed; such a turn is all content.

        A call that the gateway would refuse in a request is malformed: agents can send back every turn. ``spelled`` and
        ``prompt``: the text, and the end of the prompt, with control tokens. ``tools``: those that may be called.
        """
        thought, content = split_thought(self.prefill + text)
        plain = Turn(role="assistant", content=content, thought=thought)
        if not tools:
            return plain, False
        declared = _parsed(tools)
        if self.parse is not None:
            try:
                return _turn_of(self.parse(prompt, spelled, declared), seed), False
            except Exception:  # noqa: BLE001 - the model's own template, which may fail at any text
                return plain, True
        before, parsed = self.form.calls(split_thought(self.prefill + spelled)[1])
        try:
            calls = tuple(_call(each, declared, f"{seed}/{number}") for number, each in enumerate(parsed))
        except ApiError:
            return plain, True
        return replace(plain, content=before.strip(), calls=calls) if calls else plain, False


def _turn_of(message: Mapping[str, Any], seed: str) -> Turn:
    fields, calls = Fields(message, OFFER), [call["function"] for call in message.get("tool_calls") or []]
    return Turn(
        role="assistant",
        content=fields.text("content"),
        thought=next(filter(None, map(fields.text, _THOUGHTS)), ""),
        calls=tuple(
            function_call(call["name"], call["arguments"], call_id(f"{seed}/{number}"), "call")
            for number, call in enumerate(calls)
        ),
    )


def _call(parsed: ParsedCall, declared: Sequence[Any], seed: str) -> FunctionCall:
    """Return a call for the agent, which answers wrong arguments and unknown names; a malformed one is an ApiError."""
    arguments = parsed.arguments if parsed.arguments is not None else _from_text(parsed, declared)
    return function_call(parsed.tool, arguments, parsed.call_id or call_id(seed), "call")


def _from_text(parsed: ParsedCall, declared: Sequence[Any]) -> object:
    """Return the arguments of a call in rlcore's format, which has a text; the text if the tool does not take it."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in declared}
    found = arguments_of(schemas.get(parsed.tool, {"type": "object"}), text=parsed.argument, named=None)
    return parsed.argument if isinstance(found, str) else found


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string, or None."""
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


def as_seen(made: Rollout, stops: Sequence[str], tokenizer: ChatTokenizer) -> Rollout:
    """Return a completion that ends with the token that completes a stop string, if it has one.

    Its text ends before the stop string. The token may reach over the string: it was sampled, so it is trained.
    """
    ids = made.completion_ids
    count = len(ids) - (ids[-1] in tokenizer.eos_ids)

    def stop_in(length: int) -> int | None:
        return first_stop(tokenizer.decode(ids[:length]), stops)

    if stop_in(count) is None:
        return replace(made, text=tokenizer.decode(ids))
    length = 1 + bisect_left(range(1, count), True, key=lambda each: stop_in(each) is not None)
    # Some tokenizers hide single bytes while the next character is incomplete.
    for earlier in range(length - 1, max(0, length - _MOST_HIDDEN), -1):
        if first_stop(text := tokenizer.decode(ids[:earlier]), stops) is not None:
            length = earlier
        elif not text.endswith("\ufffd"):
            break
    text = tokenizer.decode(ids[:length])[: stop_in(length)]
    return replace(cut_to(made, length), finish_reason="stop", text=text)


def cut_to(made: Rollout, length: int) -> Rollout:
    """Return the first ``length`` tokens of a completion, with its whole text."""
    names = ("completion_ids", "sampler_logprobs", "loss_mask")
    return replace(made, **{name: getattr(made, name)[:length] for name in names})
