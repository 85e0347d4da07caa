"""How many tokens texts and conversations have, many at a time; and bounds of these numbers that need no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from rlcore.text.chat_template import interleaved, render, template_of, template_pieces, texts_within
from rlcore.text.template_syntax import preserves_text
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Role

# A token is at least one character of ASCII, and one byte of any text. Tokenizers may write some characters of other
# scripts out (one of 3 bytes as 18 letters), and put a blank or two in front.
_PER_CHARACTER, _PER_BYTE, _EXTRA = 2, 12, 16
Conversation = Sequence[Message]


def encode_all(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[Ids]:
    """Token ids of each answer by itself, with what the template puts before it; no control token comes from the text.

    Raises:
        ModelError: a control token came out all the same.
    """
    opening = Part(tokenizer.turn.opening, "template")
    return tokenizer.encoder.encode_all([[opening, Part(text, "assistant")] for text in texts])


def prompt_lengths(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Number of tokens of each conversation, with its template and generation prompt.

    Raises:
        ModelError: the template refuses a conversation, or drops or rewrites a message.
    """
    return [len(ids) for ids in tokenizer.encoder.encode_all(_written(tokenizer, conversations))]


def max_prompt_tokens(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """A number of tokens that each conversation surely does not exceed; no text is encoded.

    Raises:
        ModelError: as :func:`prompt_lengths`.
    """
    bounds: dict[str, int] = {}

    def bound(part: Part) -> int:
        if part.author != "template":
            return max_text_tokens(part.text)
        if part.text not in bounds:  # a template has few pieces; beside others each may have a token more
            bounds[part.text] = len(tokenizer.encode(part.text, "template")) + _EXTRA
        return bounds[part.text]

    return [sum(map(bound, parts)) for parts in _written(tokenizer, conversations)]


def max_text_tokens(text: str) -> int:
    """A number of tokens that a text surely does not exceed."""
    size = _PER_CHARACTER * len(text) if text.isascii() else _PER_BYTE * len(text.encode("utf-8", "replace"))
    return size + _EXTRA


def _written(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[list[Part]]:
    """Each conversation as the template writes it."""
    backend = tokenizer.hf_tokenizer
    known: dict[tuple[Role, ...], list[str]] = {}
    made = []
    for messages, whole in zip(conversations, _whole(tokenizer, conversations), strict=True):
        roles = tuple([message.role for message in messages])
        if roles not in known:
            known[roles] = template_pieces(backend, roles)
        pieces, texts = known[roles], [message.content for message in messages]
        if whole is not None:
            texts = texts_within(whole, messages, pieces, where=str(backend.name_or_path))
        made.append(interleaved(pieces, messages, texts))
    return made


def _whole(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> Sequence[str | None]:
    """Each conversation as the template writes it; None for all where its texts surely stand in it unchanged."""
    template = tokenizer.hf_tokenizer.chat_template
    is_filled = all(message.content for messages in conversations for message in messages)
    if not conversations or (is_filled and isinstance(template, str) and preserves_text(template)):
        return [None] * len(conversations)
    return _render_all(tokenizer, conversations)


def _render_all(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[str]:
    backend = tokenizer.hf_tokenizer
    turns = [[{"role": message.role, "content": message.content} for message in one] for one in conversations]
    try:
        rendered: list[str] = backend.apply_chat_template(
            turns, chat_template=template_of(backend), tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError):  # one of them: render says which
        return [render(backend, one, add_generation_prompt=True) for one in conversations]
    return rendered
