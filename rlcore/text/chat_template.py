"""What a chat template writes around the texts of a conversation, whose parts stay told apart.

The template is rendered around placeholders, so that what a person wrote never becomes a part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.text.template_date import UNRECORDED, recorded_date, with_date
from rlcore.text.text_parts import Part, control_tokens_of
from rlcore.types import Message, Role

Turn = Mapping[str, Any]
TEMPLATE_FIX = "name a Jinja file of a chat template that fits the model in model.chat_template"
_PLACEHOLDER = re.compile("\ue000\\d+\ue001")
_OPEN_THOUGHT = re.compile(r"<think>(?!.*</think>).*\Z", re.DOTALL)
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")  # what Jinja has
_CLOSED_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantTurn:
    """What a template writes around the words of an assistant's turn, after the generation prompt.

    ``prefill``: the thought that the generation prompt begins, which belongs to the words. ``opening``: what stands
    between the generation prompt and the words. ``end``: from the words to the EOS. ``rest``: what follows that.
    """

    prefill: str
    opening: str
    end: str
    rest: str


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


def written(backend: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: str = "") -> list[Part]:
    """A conversation with its generation prompt as the template writes it: its words and the messages' by turns.

    Raises:
        ModelError: it refuses the conversation, or drops or rewrites a message.
    """
    pieces = template_pieces(backend, [message.role for message in messages], tools=tools)
    rendered = render(backend, messages, add_generation_prompt=True, tools=tools)
    return interleaved(pieces, messages, texts_within(rendered, messages, pieces, where=str(backend.name_or_path)))


def interleaved(pieces: Sequence[str], messages: Sequence[Message], texts: Sequence[str]) -> list[Part]:
    """The pieces of a template with the texts of messages between them."""
    parts = [Part(pieces[0], "template")]
    for message, text, piece in zip_longest(messages, texts, pieces[1:], fillvalue=""):
        if isinstance(message, Message):
            parts.append(Part(text, "assistant" if message.role == "assistant" else "other"))
        parts.append(Part(piece, "template"))
    return parts


def texts_within(rendered: str, messages: Sequence[Message], pieces: Sequence[str], *, where: str) -> list[str]:
    """The texts of a rendered conversation: unchanged, or without the white space around them.

    Raises:
        ModelError: the template rewrote a text.
    """
    texts, place = [], len(pieces[0])
    for number, (message, piece) in enumerate(zip(messages, pieces[1:], strict=True), start=1):
        said = message.content
        forms = (said, said.strip(), said.rstrip(), said.lstrip())
        text = next((form for form in forms if rendered.startswith(form + piece, place)), None)
        if text is None or not rendered.startswith(pieces[0]):
            what = f"the chat template rewrites the text of a message: number {number}, {message.role}, {said[:80]!r}"
            raise ModelError(what, where=where, fix=_fix_of(message))
        texts.append(text)
        place += len(text) + len(piece)
    return texts


def _fix_of(message: Message) -> str:
    is_thought = message.role == "assistant" and "</think>" in message.content
    return f"leave the thoughts out of earlier turns, or {TEMPLATE_FIX}" if is_thought else TEMPLATE_FIX


def assistant_turn(backend: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> AssistantTurn:
    """What the template writes around an assistant's words.

    Raises:
        ModelError: the template draws by chance, there is no generation prompt, it does not begin the turn as the
            template does, or the turn ends with no EOS id.
    """
    user = Message(role="user", content=_placeholder(0))
    assistant = Message(role="assistant", content=_placeholder(1))
    prompt = render(backend, [user], add_generation_prompt=True)
    if _CHANCE.search(template_of(backend)):
        raise _untrainable(backend, "it draws by chance, so that a conversation would have other tokens in each stage")
    is_ignored = prompt == render(backend, [user], add_generation_prompt=False)
    demonstration = render(backend, [user, assistant], add_generation_prompt=False)
    head, _, tail = demonstration.partition(assistant.content)
    thought = _OPEN_THOUGHT.search(prompt.rpartition(user.content)[2])
    prefill = thought.group() if thought else ""
    opening = head.removeprefix(prompt) if head.startswith(prompt) and not prefill else ""
    end = _end_of(backend, tail, eos_ids)
    # A thought that the generation prompt begins, or skips by an empty one, need not be in what was said.
    if not head.startswith((prompt.removesuffix(prefill), _CLOSED_THOUGHT.sub("", prompt))):
        what = f"the generation prompt {prompt!r} is not how it begins the assistant's turn in {demonstration!r}"
        raise _untrainable(backend, what)
    if is_ignored and opening.strip():
        line = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        what = f"it writes no generation prompt: prompts would end before {opening!r}, which begins an assistant's turn"
        raise _untrainable(backend, what, fix=f"append {line} to it; {TEMPLATE_FIX}")
    if not end:
        what = f"it ends the assistant's turn with {tail!r}, which holds none of the EOS ids {list(eos_ids)}"
        controls = sorted((token for token in control_tokens_of(backend) if token in tail), key=tail.find)
        extra = f"set model.extra_eos = {json.dumps(controls[:1])} if that ends a turn; if not, {TEMPLATE_FIX}"
        raise _untrainable(backend, what, fix=extra if controls else TEMPLATE_FIX)
    return AssistantTurn(prefill=prefill, opening=opening, end=end, rest=tail.removeprefix(end))


def _end_of(backend: PreTrainedTokenizerBase, tail: str, eos_ids: Sequence[int]) -> str:
    """A text up to and with its first end of sequence; empty where it has none."""
    spelled = [backend.decode([number], clean_up_tokenization_spaces=False) for number in eos_ids]
    longest_first = sorted(filter(None, spelled), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, longest_first)) or "(?!)", tail)
    return tail[: found.end()] if found else ""


def _untrainable(backend: PreTrainedTokenizerBase, what: str, *, fix: str = TEMPLATE_FIX) -> ModelError:
    return ModelError(f"the chat template cannot be trained on: {what}", where=str(backend.name_or_path), fix=fix)


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
    """A tokenizer's chat template, which writes the day that was recorded where it asks for the date.

    Raises:
        ValueError: there is none.
    """
    return with_date(backend.get_chat_template(None, tools), recorded_date(backend) or UNRECORDED)


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters, which no template writes by itself
