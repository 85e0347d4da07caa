"""What a chat template writes around the texts of a conversation, in pieces that are encoded apart from the texts.

The template is rendered around placeholders, so that what a person wrote never becomes a part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.types import Message, Role

Turn = Mapping[str, Any]
TEMPLATE_FIX = "name a Jinja file of a chat template that fits the model in model.chat_template"
_PLACEHOLDER = re.compile("\ue000\\d+\ue001")
_OPEN_THOUGHT = re.compile(r"<think>(?!.*</think>).*\Z", re.DOTALL)
_CLOSED_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")


def encode(backend: PreTrainedTokenizerBase, text: str, *, is_template: bool) -> tuple[int, ...]:
    """Token ids of a text; control tokens come out where it is a template's."""
    return tuple(backend(text, add_special_tokens=False, split_special_tokens=not is_template).input_ids)


def template_pieces(backend: PreTrainedTokenizerBase, roles: Sequence[Role], *, tools: str = "") -> list[str]:
    """What the template writes before, between and after the texts of a conversation: one piece more than texts.

    ``tools``: the JSON list of the schemas that it describes, if any.

    Raises:
        ModelError: it refuses such a conversation, or does not write each message once and in order.
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


def texts_as_rendered(
    backend: PreTrainedTokenizerBase, messages: Sequence[Message], pieces: Sequence[str], *, tools: str = ""
) -> list[str]:
    """The messages' texts as the template writes them: unchanged, or without the white space around them.

    Raises:
        ModelError: it rewrites a text.
    """
    rendered = render(backend, messages, add_generation_prompt=True, tools=tools)
    return texts_within(rendered, messages, pieces, where=str(backend.name_or_path))


def texts_within(rendered: str, messages: Sequence[Message], pieces: Sequence[str], *, where: str) -> list[str]:
    """The texts of a rendered conversation: unchanged, or without the white space around them.

    Raises:
        ModelError: the template rewrote a text.
    """
    texts = [message.content for message in messages]
    for candidate in (texts, [text.strip() for text in texts]):
        if "".join(map("".join, zip_longest(pieces, candidate, fillvalue=""))) == rendered:
            return candidate
    what = f"the chat template rewrites the text of a message: {texts[-1][:80]!r}"
    raise ModelError(what, where=where, fix=TEMPLATE_FIX)


def assistant_turn(backend: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The prefill of the generation prompt, and the token ids that end an assistant's turn.

    Raises:
        ModelError: the generation prompt does not begin the turn as the template does, or the turn ends with no EOS id.
    """
    user = Message(role="user", content=_placeholder(0))
    assistant = Message(role="assistant", content=_placeholder(1))
    prompt = render(backend, [user], add_generation_prompt=True)
    demonstration = render(backend, [user, assistant], add_generation_prompt=False)
    head, _, tail = demonstration.partition(assistant.content)
    thought = _OPEN_THOUGHT.search(prompt.rpartition(user.content)[2])
    prefill = thought.group() if thought else ""
    tail_ids = encode(backend, tail, is_template=True)
    end = next((place for place, number in enumerate(tail_ids) if number in eos_ids), None)
    problem = ""
    # A thought that the generation prompt begins, or skips by an empty one, need not be in what was said.
    openings = (prompt.removesuffix(prefill), _CLOSED_THOUGHT.sub("", prompt))
    if not head.startswith(openings):
        problem = f"the generation prompt {prompt!r} is not how it begins the assistant's turn in {demonstration!r}"
    elif end is None:
        problem = f"it ends the assistant's turn with {tail!r}, which holds none of the EOS ids {list(eos_ids)}"
    if problem or end is None:
        raise ModelError(
            f"the chat template cannot be trained on: {problem}", where=str(backend.name_or_path), fix=TEMPLATE_FIX
        )
    return prefill, tail_ids[: end + 1]


def render(
    backend: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool, tools: str = ""
) -> str:
    """A conversation as its template writes it.

    Raises:
        ModelError: the template refuses the conversation.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return render_turns(backend, turns, add_generation_prompt=add_generation_prompt, tools=tools)


def render_turns(
    backend: PreTrainedTokenizerBase, turns: Sequence[Turn], *, add_generation_prompt: bool, tools: str = ""
) -> str:
    """The same of turns as the template takes them, which may hold calls.

    Raises:
        ModelError: the template refuses the conversation.
    """
    declared = {"tools": json.loads(tools)} if tools else {}
    try:
        text: str = backend.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=add_generation_prompt, **declared
        )
    except (TemplateError, ValueError, TypeError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ModelError(
            f"the chat template refuses a conversation of the roles {roles}: {error}",
            where=str(backend.name_or_path),
            fix=TEMPLATE_FIX,
        ) from error
    return text


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters, which no template writes by itself
