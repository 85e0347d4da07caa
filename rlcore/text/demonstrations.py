"""Demonstrations with a loss mask on the assistant's tokens, for supervised fine-tuning.

    user: 1+1 <|im_end|> assistant: | 2 <|im_end|> user: +1 <|im_end|> assistant: 3 <|im_end|>
    prompt                          | completion
    loss_mask                         T T          F     F  F          F          T T

The reference is sampling: the sampled prompt of each assistant turn, its message and the end of the turn must be a
prefix of the conversation. ``{% generation %}`` blocks of a template are compared with it. They decide if the
template writes past turns differently from sampled ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from rlcore.errors import ModelError
from rlcore.text.chat_template import interleaved, template_of
from rlcore.text.packing import TokenSequence
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

Span = tuple[int, int]
_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue000"  # placeholder: a private-use character, which no template writes
_FIX = (
    "let {% generation %} … {% endgeneration %} in the template enclose the assistant's message and its end of turn, "
    "name another template in model.chat_template, or use demonstrations with one assistant turn"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """Conversation to imitate. The prompt of ``sequence`` ends at the assistant's first message.

    ``loss_mask``: one entry per completion token, True on the assistant's messages and the EOS of its turns.
    """

    sequence: TokenSequence
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.sequence.completion_ids):
            raise ValueError(f"{len(self.loss_mask)} marks for {len(self.sequence.completion_ids)} completion tokens")

    @property
    def num_trained(self) -> int:
        """Number of tokens in the loss."""
        return sum(self.loss_mask)


def render_conversation(tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str) -> Demonstration:
    """Tokenize a conversation and its last answer, with a mask on all assistant turns.

    The last turn has the tokens that would be sampled after ``messages``. Message text never yields a control token.

    Raises:
        ModelError: The template refuses the conversation or rewrites a text, its generation blocks mark tokens that are
            not the assistant's, or an earlier assistant turn cannot be located.
    """
    prompt_ids, answer_ids = tokenizer.render_demonstration(messages, completion)
    spans = _earlier_turns(tokenizer, messages, completion, prompt_ids)
    spans.append((len(prompt_ids), len(prompt_ids) + len(answer_ids)))
    first, ids = spans[0][0], prompt_ids + answer_ids
    mask = [False] * len(ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    sequence = TokenSequence(prompt_ids=ids[:first], completion_ids=ids[first:])
    return Demonstration(sequence=sequence, loss_mask=tuple(mask[first:]))


def _earlier_turns(
    tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: Ids
) -> list[Span]:
    """Return the token spans of earlier assistant turns in the prompt."""
    marked = block_spans(tokenizer, messages, completion, prompt_ids) if has_generation_block(tokenizer) else None
    sampled = assistant_spans(tokenizer, messages, prompt_ids)
    if sampled is not None:
        return sampled
    if marked is not None:
        return marked
    raise _refusal(
        tokenizer,
        "the chat template writes an earlier assistant turn differently from a sampled one and does not mark it with a "
        "generation block, so the tokens to train on are unknown",
    )


def has_generation_block(tokenizer: ChatTokenizer) -> bool:
    """Return True if the template marks the assistant's messages."""
    return _BLOCK.search(str(tokenizer.hf_tokenizer.chat_template)) is not None


def assistant_spans(tokenizer: ChatTokenizer, messages: Sequence[Message], prompt_ids: Ids) -> list[Span] | None:
    """Return the token spans of assistant turns in ``prompt_ids``, found by rendering turn by turn.

    Returns None if a sampled prompt and answer are not a prefix of the conversation.
    """
    turn, spans = tokenizer.turn, []
    parts = tokenizer.render_parts(messages)
    for index in _assistant_indices(messages):
        part_index, after = 2 * index + 1, parts[2 * index + 2]
        before = tokenizer.render_parts(messages[:index])
        text, sampled = _text(parts[: part_index + 1]), _text(before)
        words = parts[part_index].text.removeprefix(turn.prefill)
        ways = [sampled + words, sampled + turn.opening + words]
        if (
            not parts[part_index].text.startswith(turn.prefill)
            or text not in ways
            or not after.text.startswith(turn.end)
        ):
            return None
        spans.append(_span(tokenizer, before, [*parts[: part_index + 1], Part(turn.end, "template")], prompt_ids))
    return spans


def block_spans(tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: Ids) -> list[Span]:
    """Return the token spans that the template's generation blocks mark in ``prompt_ids``.

    Raises:
        ModelError: A block marks more or less than an assistant's message and the end of its turn.
    """
    conversation = [*messages, Message(role="assistant", content=completion)]
    known = tokenizer.render_parts(messages)
    texts = [*(part.text for part in known[1::2]), completion]
    rendered, blocks = _rendered_with_blocks(tokenizer, conversation)

    def up_to(index: int) -> list[Part]:
        pieces = rendered[:index].split(_MARK)
        return interleaved(pieces, conversation[: len(pieces) - 1], texts[: len(pieces) - 1])

    marked = [_text(up_to(end)).removeprefix(_text(up_to(start))) for start, end in blocks]
    turn, expected = tokenizer.turn, [texts[index] + tokenizer.turn.end for index in _assistant_indices(conversation)]
    if len(marked) != len(expected) or any(
        found not in (words, turn.opening + words) for found, words in zip(marked, expected, strict=True)
    ):
        raise _refusal(tokenizer, _difference(marked, expected))
    # The last block is the answer, which is not in the prompt.
    return [_span(tokenizer, up_to(start), up_to(end), prompt_ids) for start, end in blocks[:-1]]


def _span(tokenizer: ChatTokenizer, before: Sequence[Part], through: Sequence[Part], ids: Ids) -> Span:
    """Return the span of a turn in a conversation's tokens. A token shared with the text before belongs to the turn.

    Raises:
        ModelError: The turn is not a prefix of the conversation.
    """
    start, end = tokenizer.encoder.encode_all([before, through])
    if ids[: len(end)] != end:
        raise _refusal(tokenizer, "the chat template writes the same turns differently if an answer follows")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
    return shared, len(end)


def _rendered_with_blocks(tokenizer: ChatTokenizer, conversation: Sequence[Message]) -> tuple[str, list[Span]]:
    """Render the conversation with placeholders for messages; return the text and the spans of its blocks."""
    backend = tokenizer.hf_tokenizer
    turns = [{"role": message.role, "content": _MARK} for message in conversation]
    try:
        ((rendered,), (blocks,)) = render_jinja_template(
            [turns],
            chat_template=template_of(backend),
            return_assistant_tokens_mask=True,
            **backend.special_tokens_map,
        )
    except TemplateError as error:
        raise _refusal(
            tokenizer, f"the chat template refuses a conversation that ends with an assistant turn: {error}"
        ) from error
    if rendered.count(_MARK) != len(turns):
        raise _refusal(tokenizer, f"the chat template writes {rendered.count(_MARK)} of {len(turns)} messages")
    return rendered, [(start, end) for start, end in blocks if start < end]


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


def _assistant_indices(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _difference(marked: Sequence[str], expected: Sequence[str]) -> str:
    """Describe the first difference between marked and assistant turns."""
    if len(marked) != len(expected):
        return f"the chat template's generation blocks mark {len(marked)} turns, but the assistant has {len(expected)}"
    theirs, ours = next((found, words) for found, words in zip(marked, expected, strict=True) if found != words)
    return f"the chat template's generation block marks {theirs!r}, but the assistant's turn is {ours!r}"


def _refusal(tokenizer: ChatTokenizer, what: str) -> ModelError:
    return ModelError(what, where=str(tokenizer.hf_tokenizer.name_or_path), fix=_FIX)
