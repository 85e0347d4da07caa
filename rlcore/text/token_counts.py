"""Token counts of many texts and conversations, and upper bounds that need no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jinja2 import TemplateError

from rlcore.text.chat_template import interleaved, render, template_of, template_pieces, texts_within
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Role

# A token has at least one ASCII character or one byte. Tokenizers may expand characters of other scripts (3 bytes to 18
# letters), and prepend one or two blanks.
_PER_CHARACTER, _PER_BYTE, _EXTRA = 2, 12, 16
Conversation = Sequence[Message]


def encode_all(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of each answer, with the template's opening; see :meth:`PartEncoder.encode_all`.

    Raises:
        ModelError: User text yields a control token.
    """
    opening = Part(tokenizer.turn.opening, "template")
    return tokenizer.encoder.encode_all([[opening, Part(text, "assistant")] for text in texts])


def prompt_lengths(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Return the number of tokens of each conversation, with template and generation prompt.

    Raises:
        ModelError: The template refuses a conversation, or drops or rewrites a message.
    """
    return [len(ids) for ids in tokenizer.encoder.encode_all(_written(tokenizer, conversations))]


def max_prompt_tokens(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Return an upper bound of :func:`prompt_lengths` without encoding any text.

    Raises:
        ModelError: As :func:`prompt_lengths`.
    """
    bounds: dict[str, int] = {}

    def bound(piece: str) -> int:
        if piece not in bounds:  # templates have few pieces; each may gain a token when merged with text
            bounds[piece] = len(tokenizer.encode(piece, "template")) + _EXTRA
        return bounds[piece]

    return [
        sum(map(bound, pieces)) + sum([max_text_tokens(text) for text in texts])
        for pieces, texts in _divided(tokenizer, conversations)
    ]


def max_text_tokens(text: str) -> int:
    """Return an upper bound of the number of tokens of a text without encoding it."""
    if text.isascii():
        return _PER_CHARACTER * len(text) + _EXTRA
    return _PER_BYTE * len(text.encode("utf-8", "replace")) + _EXTRA


def _written(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[list[Part]]:
    divided = _divided(tokenizer, conversations)
    return [interleaved(pieces, own, texts) for own, (pieces, texts) in zip(conversations, divided, strict=True)]


def _divided(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> Iterator[tuple[list[str], list[str]]]:
    backend = tokenizer.hf_tokenizer
    known: dict[tuple[Role, ...], list[str]] = {}
    for messages, whole in zip(conversations, _render_all(tokenizer, conversations), strict=True):
        roles = tuple([message.role for message in messages])
        if roles not in known:
            known[roles] = template_pieces(backend, roles)
        yield known[roles], texts_within(whole, messages, known[roles], where=str(backend.name_or_path))


def _render_all(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[str]:
    if not conversations:
        return []
    backend = tokenizer.hf_tokenizer
    turns = [[{"role": message.role, "content": message.content} for message in one] for one in conversations]
    try:
        rendered: list[str] = backend.apply_chat_template(
            turns, chat_template=template_of(backend), tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError):  # render names the conversation
        return [render(backend, one, add_generation_prompt=True) for one in conversations]
    return rendered
