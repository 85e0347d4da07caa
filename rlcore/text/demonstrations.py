"""Demonstrations with a loss mask on the assistant's tokens, for supervised fine-tuning.

    user: 1+1 <|im_end|> assistant: | 2 <|im_end|> user: +1 <|im_end|> assistant: 3 <|im_end|>
    prompt                          | completion
    loss_mask                         T T          F     F  F          F          T T

The reference is sampling: the sampled prompt of each assistant turn, its message and the end of the turn must be a
prefix of the conversation. ``{% generation %}`` blocks of a template are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rlcore.errors import ModelError
from rlcore.text.packing import TokenSequence
from rlcore.text.text_parts import Ids, Part
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

Span = tuple[int, int]


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
        ModelError: The template refuses the conversation or rewrites a text, or writes an earlier assistant turn
            differently from a sampled one.
    """
    prompt_ids, answer_ids = tokenizer.render_demonstration(messages, completion)
    spans = _earlier_turns(tokenizer, messages, prompt_ids)
    spans.append((len(prompt_ids), len(prompt_ids) + len(answer_ids)))
    first, ids = spans[0][0], prompt_ids + answer_ids
    mask = [False] * len(ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    sequence = TokenSequence(prompt_ids=ids[:first], completion_ids=ids[first:])
    return Demonstration(sequence=sequence, loss_mask=tuple(mask[first:]))


def _earlier_turns(tokenizer: ChatTokenizer, messages: Sequence[Message], prompt_ids: Ids) -> list[Span]:
    turn, spans = tokenizer.turn, list[Span]()
    parts = tokenizer.render_parts(messages)
    for index in [index for index, message in enumerate(messages) if message.role == "assistant"]:
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
            raise _refusal(
                tokenizer, "the chat template writes an earlier assistant turn differently from a sampled one"
            )
        spans.append(_span(tokenizer, before, [*parts[: part_index + 1], Part(turn.end, "template")], prompt_ids))
    return spans


def _span(tokenizer: ChatTokenizer, before: Sequence[Part], through: Sequence[Part], ids: Ids) -> Span:
    """Return the span of a turn in a conversation's tokens. A token shared with the text before belongs to the turn."""
    start, end = tokenizer.encoder.encode_all([before, through])
    if ids[: len(end)] != end:
        raise _refusal(tokenizer, "the chat template writes the same turns differently if an answer follows")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
    return shared, len(end)


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


def _refusal(tokenizer: ChatTokenizer, what: str) -> ModelError:
    return ModelError(
        what,
        where=str(tokenizer.hf_tokenizer.name_or_path),
        fix="name another template in model.chat_template, or use demonstrations with one assistant turn",
    )
