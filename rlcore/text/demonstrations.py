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
    tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: Ids
) -> list[Span]:
    """Where in the prompt the assistant has spoken before."""
    marked = block_spans(tokenizer, messages, completion, prompt_ids) if has_generation_block(tokenizer) else None
    sampled = assistant_spans(tokenizer, messages, prompt_ids)
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
    return _BLOCK.search(str(tokenizer.hf_tokenizer.chat_template)) is not None


def assistant_spans(tokenizer: ChatTokenizer, messages: Sequence[Message], prompt_ids: Ids) -> list[Span] | None:
    """Token spans of the assistant's turns in ``prompt_ids``, found by rendering turn by turn.

    None where the prompt and answer of a turn, as they would be sampled, are not how the conversation begins.
    """
    turn, spans = tokenizer.turn, []
    parts = tokenizer.written(messages)
    for place in _assistant_places(messages):
        said, after = 2 * place + 1, parts[2 * place + 2]
        before = tokenizer.written(messages[:place])
        text, sampled = _text(parts[: said + 1]), _text(before)
        words = parts[said].text.removeprefix(turn.prefill)
        ways = [sampled + words, sampled + turn.opening + words]
        if not parts[said].text.startswith(turn.prefill) or text not in ways or not after.text.startswith(turn.end):
            return None
        spans.append(_span(tokenizer, before, [*parts[: said + 1], Part(turn.end, "template")], prompt_ids))
    return spans


def block_spans(tokenizer: ChatTokenizer, messages: Sequence[Message], completion: str, prompt_ids: Ids) -> list[Span]:
    """Token spans that the template's generation blocks mark in ``prompt_ids``.

    Raises:
        ModelError: a block marks more or less than an assistant's words and the end of its turn.
    """
    conversation = [*messages, Message(role="assistant", content=completion)]
    known = tokenizer.written(messages)
    texts = [*(part.text for part in known[1::2]), completion]
    rendered, blocks = _rendered_with_blocks(tokenizer, conversation)

    def up_to(place: int) -> list[Part]:
        pieces = rendered[:place].split(_MARK)
        return interleaved(pieces, conversation[: len(pieces) - 1], texts[: len(pieces) - 1])

    marked = [_text(up_to(end)).removeprefix(_text(up_to(start))) for start, end in blocks]
    turn, said = tokenizer.turn, [texts[place] + tokenizer.turn.end for place in _assistant_places(conversation)]
    if len(marked) != len(said) or any(
        found not in (words, turn.opening + words) for found, words in zip(marked, said, strict=True)
    ):
        raise _refusal(tokenizer, _difference(marked, said))
    # The last block is the answer, which does not stand in the prompt.
    return [_span(tokenizer, up_to(start), up_to(end), prompt_ids) for start, end in blocks[:-1]]


def _span(tokenizer: ChatTokenizer, before: Sequence[Part], through: Sequence[Part], ids: Ids) -> Span:
    """Where a turn stands among a conversation's tokens; a token that it shares with what is before belongs to it.

    Raises:
        ModelError: the conversation does not begin with it.
    """
    start, end = tokenizer.encoder.encode_all([before, through])
    if ids[: len(end)] != end:
        raise _refusal(tokenizer, "the chat template writes the same turns in another way when an answer follows")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
    return shared, len(end)


def _rendered_with_blocks(tokenizer: ChatTokenizer, conversation: Sequence[Message]) -> tuple[str, list[Span]]:
    """The conversation as text with a placeholder for every message, and the places of its generation blocks."""
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
            tokenizer, f"the chat template refuses a conversation that ends with an answer: {error}"
        ) from error
    if rendered.count(_MARK) != len(turns):
        raise _refusal(tokenizer, f"the chat template writes {rendered.count(_MARK)} of {len(turns)} messages")
    return rendered, [(start, end) for start, end in blocks if start < end]


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


def _assistant_places(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def _difference(marked: Sequence[str], said: Sequence[str]) -> str:
    """Where a template's marks go wrong, in words."""
    if len(marked) != len(said):
        return f"the chat template's generation blocks mark {len(marked)} turns where the assistant has {len(said)}"
    theirs, ours = next((found, words) for found, words in zip(marked, said, strict=True) if found != words)
    return f"the chat template's generation block marks {theirs!r} where the assistant's turn is {ours!r}"


def _refusal(tokenizer: ChatTokenizer, what: str) -> ModelError:
    return ModelError(what, where=str(tokenizer.hf_tokenizer.name_or_path), fix=_FIX)
