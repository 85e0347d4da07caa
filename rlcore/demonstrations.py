"""Which tokens of a conversation the assistant says: what supervised fine-tuning trains on, and nothing else.

    user: 1+1 <|im_end|> assistant: | 2 <|im_end|> user: +1 <|im_end|> assistant: 3 <|im_end|>
    prompt                          | completion
    loss_mask                         T T          F     F  F          F          T T

The truth is how a turn would be sampled: the prompt of every assistant's turn, then its words and the end of turn,
must be how the whole conversation begins (the prefix property). A template that marks the assistant's words with
``{% generation %}`` is held against it, and decides where the template writes past turns otherwise than sampled ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from rlcore.errors import ModelError
from rlcore.packing import TokenSequence
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Message

Span = tuple[int, int]
_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue000"  # the first character of a placeholder: private use, which no template writes by itself
_FIX = (
    "let {% generation %} … {% endgeneration %} in the template enclose the assistant's words and the end of its turn, "
    "name another template in model.chat_template, or keep to demonstrations of one assistant's turn"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A conversation to be copied; the sequence's prompt ends where the assistant first speaks.

    ``loss_mask``: one entry per completion token, True on the assistant's words and the EOS of each of its turns.
    """

    sequence: TokenSequence
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.sequence.completion_ids):
            raise ValueError(f"{len(self.loss_mask)} marks for {len(self.sequence.completion_ids)} completion tokens")

    @property
    def num_trained(self) -> int:
        """How many tokens count in the loss."""
        return sum(self.loss_mask)


def render_conversation(tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str) -> Demonstration:
    """A conversation and its last answer as tokens, with a mask on every assistant's turn.

    The last turn is tokenized exactly as it would be sampled after ``messages``; a control token never comes from text.

    Raises:
        ModelError: the template refuses the conversation or rewrites a text, its generation blocks mark other tokens
            than the assistant's, or an earlier turn of the assistant cannot be found in it.
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
    tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: tuple[int, ...]
) -> list[Span]:
    """Where in the prompt the assistant has spoken before."""
    marked = block_spans(tokenizer, messages, completion, prompt_ids) if has_generation_block(tokenizer) else None
    sampled = turn_spans(tokenizer, messages, prompt_ids)
    if sampled is not None:
        return sampled
    if marked is not None:
        return marked
    raise _refusal(
        tokenizer,
        "the chat template writes an earlier turn of the assistant otherwise than it would be sampled, and marks it "
        "with no generation block, so it is not known on which tokens to train",
    )


def has_generation_block(tokenizer: ChatTokenizer) -> bool:
    """Whether the template says by itself which words are the assistant's."""
    return _BLOCK.search(str(tokenizer.backend.chat_template)) is not None


def turn_spans(tokenizer: ChatTokenizer, messages: Sequence[Message], prompt_ids: tuple[int, ...]) -> list[Span] | None:
    """Token spans of the assistant's turns in ``prompt_ids``, found by rendering turn by turn.

    None where the prompt and answer of a turn, as they would be sampled, are not how ``prompt_ids`` begins.
    """
    places = _assistant_places(messages)
    texts = tokenizer.rendered_texts(messages) if places else []
    spans = []
    for place in places:
        if not texts[place].startswith(tokenizer.prefill):
            return None
        before = tokenizer.render_prompt(messages[:place])
        answer = tokenizer.encode(texts[place].removeprefix(tokenizer.prefill)) + tokenizer.end_of_turn
        if prompt_ids[: len(before) + len(answer)] != before + answer:
            return None
        spans.append((len(before), len(before) + len(answer)))
    return spans


def block_spans(
    tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: tuple[int, ...]
) -> list[Span]:
    """Token spans that the template's generation blocks mark in ``prompt_ids``.

    Raises:
        ModelError: a block marks more or less than an assistant's words and the end of its turn.
    """
    conversation = [*messages, Message(role="assistant", content=completion)]
    texts = [*tokenizer.rendered_texts(messages), completion]
    ids, mask = _marked_tokens(tokenizer, conversation, texts)
    runs = [(run[0], run[-1] + 1) for is_marked, run in _runs(mask) if is_marked]
    said = [tokenizer.encode(texts[place]) + tokenizer.end_of_turn for place in _assistant_places(conversation)]
    marked = [ids[start:end] for start, end in runs]
    if marked != said:
        raise _refusal(tokenizer, _difference(tokenizer, marked, said))
    spans = runs[:-1]  # the last is the answer, which does not stand in the prompt
    if spans and ids[: spans[-1][1]] != prompt_ids[: spans[-1][1]]:
        raise _refusal(tokenizer, "the chat template writes the same turns in another way when an answer follows")
    return spans


def _marked_tokens(
    tokenizer: ChatTokenizer, conversation: Sequence[Message], texts: Sequence[str]
) -> tuple[tuple[int, ...], list[bool]]:
    """The conversation's tokens, and for each whether it stands in a generation block."""
    rendered, blocks = _rendered_with_blocks(tokenizer, conversation)
    ids: tuple[int, ...] = ()
    mask: list[bool] = []
    waiting = iter(texts)
    for is_marked, run in _runs([any(start <= place < end for start, end in blocks) for place in range(len(rendered))]):
        written = rendered[run[0] : run[-1] + 1]
        for number, piece in enumerate(written.split(_MARK)):
            made = (tokenizer.encode(next(waiting)) if number else ()) + tokenizer.encode_template(piece)
            ids, mask = ids + made, mask + [is_marked] * len(made)
    return ids, mask


def _rendered_with_blocks(tokenizer: ChatTokenizer, conversation: Sequence[Message]) -> tuple[str, Sequence[Span]]:
    """The conversation as text with a placeholder for every message, and the places of its generation blocks."""
    backend = tokenizer.backend
    turns = [{"role": message.role, "content": _MARK} for message in conversation]
    try:
        ((rendered,), (blocks,)) = render_jinja_template(
            [turns],
            chat_template=backend.chat_template,
            return_assistant_tokens_mask=True,
            **backend.special_tokens_map,
        )
    except TemplateError as error:
        raise _refusal(
            tokenizer, f"the chat template refuses a conversation that ends with an answer: {error}"
        ) from error
    if rendered.count(_MARK) != len(turns):
        raise _refusal(tokenizer, f"the chat template writes {rendered.count(_MARK)} of {len(turns)} messages")
    return rendered, blocks


def _runs(marks: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """Neighbouring places with the same mark."""
    return [(mark, list(places)) for mark, places in groupby(range(len(marks)), key=marks.__getitem__)]


def _assistant_places(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def _difference(tokenizer: ChatTokenizer, marked: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> str:
    """Where a template's marks go wrong, in words."""
    if len(marked) != len(said):
        return f"the chat template's generation blocks mark {len(marked)} turns where the assistant has {len(said)}"
    pairs = zip(marked, said, strict=True)
    ours, theirs = next((right, wrong) for wrong, right in pairs if tuple(wrong) != tuple(right))
    shown = [tokenizer.backend.decode(list(ids), skip_special_tokens=False) for ids in (theirs, ours)]
    return f"the chat template's generation block marks {shown[0]!r} where the assistant's turn is {shown[1]!r}"


def _refusal(tokenizer: ChatTokenizer, what: str) -> ModelError:
    return ModelError(what, where=str(tokenizer.backend.name_or_path), fix=_FIX)
