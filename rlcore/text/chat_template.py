"""Rendering of chat templates, with the template's text kept apart from the messages' text.

Templates are rendered around placeholders, so that user text never becomes part of the template.

Templates read the clock (``strftime_now``). They get a fixed date, the same for all stages of a model's training, which
is recorded in the tokenizer's configuration on import; the template itself is unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.text.text_parts import Part, control_tokens_of
from rlcore.types import Message, Role

Turn = Mapping[str, Any]
TEMPLATE_FIX = "name a Jinja file of a chat template that fits the model in model.chat_template"
_PLACEHOLDER = re.compile("\ue000\\d+\ue001")
_OPEN_THOUGHT = re.compile(r"<think>(?!.*</think>).*\Z", re.DOTALL)
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")  # random functions of Jinja
_CLOSED_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantTurn:
    """Template text around an assistant's message, after the generation prompt.

    Attributes:
        prefill: Thought that the generation prompt begins; completions continue it.
        opening: Text between the generation prompt and the message.
        end: Text from the message to the EOS, inclusive: also one that begins the next message, as GLM's do.
        tail: Text after the message at the end of a conversation.
    """

    prefill: str
    opening: str
    end: str
    tail: str


def template_pieces(backend: PreTrainedTokenizerBase, roles: Sequence[Role], *, tools: str = "") -> list[str]:
    """Return the template's text before, between and after the messages: one piece more than messages.

    ``tools``: JSON list of tool schemas, or "".

    Raises:
        ModelError: The template refuses these roles, or does not write each message once and in order.
    """
    messages = [Message(role=role, content=_placeholder(number)) for number, role in enumerate(roles)]
    rendered = render(backend, messages, add_generation_prompt=True, tools=tools)
    if _PLACEHOLDER.findall(rendered) != [message.content for message in messages]:
        raise ModelError(
            f"the chat template does not write each message of the roles {', '.join(roles)} once and in order",
            where=str(backend.name_or_path),
            fix=TEMPLATE_FIX,
        )
    return _PLACEHOLDER.split(rendered)


def render_parts(backend: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: str = "") -> list[Part]:
    """Render a conversation with its generation prompt, as alternating template and message parts.

    Raises:
        ModelError: The template refuses the conversation, or drops or rewrites a message.
    """
    pieces = template_pieces(backend, [message.role for message in messages], tools=tools)
    rendered = render(backend, messages, add_generation_prompt=True, tools=tools)
    return interleaved(pieces, messages, texts_within(rendered, messages, pieces, where=str(backend.name_or_path)))


def interleaved(pieces: Sequence[str], messages: Sequence[Message], texts: Sequence[str]) -> list[Part]:
    """Return the pieces of a template with the texts of messages between them."""
    parts = [Part(pieces[0], "template")]
    for message, text, piece in zip_longest(messages, texts, pieces[1:], fillvalue=""):
        if isinstance(message, Message):
            parts.append(Part(text, "assistant" if message.role == "assistant" else "other"))
        parts.append(Part(piece, "template"))
    return parts


def texts_within(rendered: str, messages: Sequence[Message], pieces: Sequence[str], *, where: str) -> list[str]:
    """Return the message texts in a rendered conversation, which may lack surrounding whitespace.

    Raises:
        ModelError: The template rewrote a text.
    """
    texts, start = [], len(pieces[0])
    for number, (message, piece) in enumerate(zip(messages, pieces[1:], strict=True), start=1):
        content = message.content
        forms = (content, content.strip(), content.rstrip(), content.lstrip())
        text = next((form for form in forms if rendered.startswith(form + piece, start)), None)
        if text is None or not rendered.startswith(pieces[0]):
            what = f"the chat template rewrites message {number} ({message.role}): {content[:80]!r}"
            raise ModelError(what, where=where, fix=_fix_of(message))
        texts.append(text)
        start += len(text) + len(piece)
    return texts


def _fix_of(message: Message) -> str:
    is_thought = message.role == "assistant" and "</think>" in message.content
    return f"leave the thoughts out of earlier turns, or {TEMPLATE_FIX}" if is_thought else TEMPLATE_FIX


def assistant_turn(backend: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> AssistantTurn:
    """Return the template text around an assistant's message.

    Raises:
        ModelError: The template is random, has no generation prompt or one that differs from its assistant turn, or
            ends the turn without an EOS id.
    """
    user = Message(role="user", content=_placeholder(0))
    assistant = Message(role="assistant", content=_placeholder(1))
    prompt = render(backend, [user], add_generation_prompt=True)
    if _CHANCE.search(template_of(backend)):
        raise _untrainable(backend, "it uses random functions, so tokens would differ between stages")
    is_ignored = prompt == render(backend, [user], add_generation_prompt=False)
    demonstration = render(backend, [user, assistant], add_generation_prompt=False)
    head, _, tail = demonstration.partition(assistant.content)
    thought = _OPEN_THOUGHT.search(prompt.rpartition(user.content)[2])
    prefill = thought.group() if thought else ""
    opening = head.removeprefix(prompt) if head.startswith(prompt) and not prefill else ""
    end = _end_of(backend, tail, eos_ids) or _end_of(backend, _before_next(backend), eos_ids)
    # A demonstration need not contain the thought that the generation prompt begins or skips.
    if not head.startswith((prompt.removesuffix(prefill), _CLOSED_THOUGHT.sub("", prompt))):
        what = f"the generation prompt {prompt!r} differs from the start of the assistant's turn in {demonstration!r}"
        raise _untrainable(backend, what)
    if is_ignored and opening.strip():
        line = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        what = f"it has no generation prompt: prompts would end before {opening!r}, which begins an assistant's turn"
        raise _untrainable(backend, what, fix=f"append {line} to it; {TEMPLATE_FIX}")
    if not end:
        what = f"it ends the assistant's turn with {tail!r}, which contains no EOS id ({list(eos_ids)})"
        controls = sorted((token for token in control_tokens_of(backend) if token in tail), key=tail.find)
        extra = f"set model.extra_eos = {json.dumps(controls[:1])} if that ends a turn; otherwise {TEMPLATE_FIX}"
        raise _untrainable(backend, what, fix=extra if controls else TEMPLATE_FIX)
    return AssistantTurn(prefill=prefill, opening=opening, end=end, tail=tail)


def _before_next(backend: PreTrainedTokenizerBase) -> str:
    try:
        return template_pieces(backend, ["user", "assistant", "user"])[2]
    except ModelError:
        return ""


def _end_of(backend: PreTrainedTokenizerBase, tail: str, eos_ids: Sequence[int]) -> str:
    spelled = [backend.decode([number], clean_up_tokenization_spaces=False) for number in eos_ids]
    longest_first = sorted(filter(None, spelled), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, longest_first)) or "(?!)", tail)
    return tail[: found.end()] if found else ""


def _untrainable(backend: PreTrainedTokenizerBase, what: str, *, fix: str = TEMPLATE_FIX) -> ModelError:
    return ModelError(f"the chat template is unsuitable for training: {what}", where=str(backend.name_or_path), fix=fix)


def render(
    backend: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool, tools: str = ""
) -> str:
    """Render a conversation as text.

    Raises:
        ModelError: The template refuses the conversation.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return render_turns(backend, turns, add_generation_prompt=add_generation_prompt, tools=tools)


def render_turns(
    backend: PreTrainedTokenizerBase, turns: Sequence[Turn], *, add_generation_prompt: bool, tools: str = ""
) -> str:
    """Render turns in the template's own format, which may hold tool calls.

    Raises:
        ModelError: The template refuses the conversation.
    """
    declared = {"tools": json.loads(tools)} if tools else {}
    try:
        template = template_of(backend, tools=declared.get("tools"))
        text: str = backend.apply_chat_template(
            list(turns),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **declared,
        )
    except (TemplateError, ValueError, TypeError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ModelError(
            f"the chat template refuses a conversation of the roles {roles}: {error}",
            where=str(backend.name_or_path),
            fix=TEMPLATE_FIX,
        ) from error
    return text


def template_of(backend: PreTrainedTokenizerBase, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return a tokenizer's chat template, with the clock replaced by the recorded date.

    Raises:
        ValueError: The tokenizer has no template.
    """
    return with_date(backend.get_chat_template(None, tools), recorded_date(backend) or UNRECORDED)


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters, which no template writes


KEY = "template_date"  # in tokenizer_config.json
UNRECORDED = date(2025, 1, 1)  # for models that were never imported
_CLOCK = "strftime_now"
_DIRECTIVE = re.compile(r"%-?[aAbBcdDeFgGhHIjklmMnprRStTuUVwWxXyYzZ]")


def writes_date(template: str) -> bool:
    """Return True if a chat template reads the clock."""
    return _CLOCK in template


def recorded_date(backend: PreTrainedTokenizerBase) -> date | None:
    """Return the date recorded with a tokenizer, if any.

    Raises:
        ModelError: The recorded text is not a date.
    """
    text = backend.init_kwargs.get(KEY)
    try:
        return date.fromisoformat(text) if text else None
    except (TypeError, ValueError) as error:
        where = f"{backend.name_or_path}/tokenizer_config.json"
        raise ModelError(f"{KEY} is not a date: {text!r}", where=where, fix="write it as 2026-11-25") from error


def record_date(backend: PreTrainedTokenizerBase, day: date) -> None:
    """Record the date that a tokenizer's template writes."""
    backend.init_kwargs[KEY] = day.isoformat()


@lru_cache(maxsize=64)
def with_date(template: str, day: date) -> str:
    """Return the chat template with the clock replaced by ``day``; unchanged if it does not read the clock."""
    if not writes_date(template):
        return template
    midnight = datetime(day.year, day.month, day.day)
    directives = sorted(set(_DIRECTIVE.findall(template)))  # those without padding (%-d) come first
    filters = "".join(f" | replace({each!r}, {midnight.strftime(each)!a})" for each in directives)
    # transformers trims the newline after a block, so the template's own first line is unchanged.
    return f"{{%- macro {_CLOCK}(format) %}}{{{{ format{filters} | replace('%%', '%') }}}}{{% endmacro %}}\n{template}"
