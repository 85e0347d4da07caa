"""How many tokens texts and conversations have, many at a time; and bounds of these numbers that need no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jinja2 import TemplateError

from rlcore.chat_template import render, template_pieces, texts_within
from rlcore.template_syntax import writes_texts_unchanged
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Message, Role

# A token is at least one character of ASCII, and one byte of any text. Tokenizers may write some characters of other
# scripts out (one of 3 bytes as 18 letters), and put a blank or two in front.
_PER_CHARACTER, _PER_BYTE, _EXTRA = 2, 12, 16
Conversation = Sequence[Message]


def encode_all(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, in which nothing is a control token.

    Raises:
        ModelError: a control token came out all the same.
    """
    if not texts:
        return []
    ids: list[list[int]] = tokenizer.backend(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False
    ).input_ids
    controls = frozenset(tokenizer.special_tokens.values())
    for text, one in zip(texts, ids, strict=True):
        if not controls.isdisjoint(one):
            tokenizer.encode(text)  # raises, and says what to do
    return ids


def prompt_lengths(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """Number of tokens of each conversation, with its template and generation prompt.

    Raises:
        ModelError: the template refuses a conversation, or drops or rewrites a message.
    """
    frames, texts = _rendered(tokenizer, conversations)
    counts = map(len, encode_all(tokenizer, list(chain.from_iterable(texts))))
    return [frame + sum(next(counts) for _ in one) for frame, one in zip(frames, texts, strict=True)]


def prompt_bounds(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[int]:
    """A number of tokens that each conversation surely does not exceed; no text is encoded.

    Raises:
        ModelError: as :func:`prompt_lengths`.
    """
    frames, texts = _rendered(tokenizer, conversations)
    return [frame + sum(map(text_bound, one)) for frame, one in zip(frames, texts, strict=True)]


def text_bound(text: str) -> int:
    """A number of tokens that a text surely does not exceed."""
    size = _PER_CHARACTER * len(text) if text.isascii() else _PER_BYTE * len(text.encode("utf-8", "replace"))
    return size + _EXTRA


def _rendered(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> tuple[list[int], list[list[str]]]:
    """Of each conversation, the number of tokens that its template adds, and its texts as the template writes them."""
    backend = tokenizer.backend
    known: dict[tuple[Role, ...], tuple[list[str], int]] = {}
    frames, texts = [], []
    for messages, whole in zip(conversations, _whole(tokenizer, conversations), strict=True):
        roles = tuple([message.role for message in messages])
        if roles not in known:
            pieces = template_pieces(backend, roles)
            known[roles] = pieces, sum(len(tokenizer.encode_template(piece)) for piece in pieces)
        pieces, size = known[roles]
        frames.append(size)
        if whole is None:
            texts.append([message.content for message in messages])
        else:
            texts.append(texts_within(whole, messages, pieces, where=str(backend.name_or_path)))
    return frames, texts


def _whole(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> Sequence[str | None]:
    """Each conversation as the template writes it; None for all where its texts surely stand in it unchanged."""
    template = tokenizer.backend.chat_template
    is_filled = all(message.content for messages in conversations for message in messages)
    if not conversations or (is_filled and isinstance(template, str) and writes_texts_unchanged(template)):
        return [None] * len(conversations)
    return _render_all(tokenizer, conversations)


def _render_all(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[str]:
    backend = tokenizer.backend
    turns = [[{"role": message.role, "content": message.content} for message in one] for one in conversations]
    try:
        rendered: list[str] = backend.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError):  # one of them: render says which
        return [render(backend, one, add_generation_prompt=True) for one in conversations]
    return rendered
