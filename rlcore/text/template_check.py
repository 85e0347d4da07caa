"""Proofs that a chat template and its tokenizer can be trained with, on conversations of several shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rlcore.errors import ModelError
from rlcore.text.chat_template import TEMPLATE_FIX, template_of
from rlcore.types import Message, Role

if TYPE_CHECKING:
    from rlcore.text.tokenization import ChatTokenizer

_SHAPES: tuple[tuple[Role, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)
# By turns, so that each stands in each place: plain words, white space at both ends, brackets and marks of lists.
_TEXTS = ("What is 12 + 30?", "  x = 7\n", "\n\n1. one\n2. two", "(b)")
_ANSWERS = ("Yes, it is 7.", "7")


def require_round_trip(tokenizer: ChatTokenizer) -> None:
    """Prove on a probe that messages survive the round trip and that text cannot end a turn.

    Raises:
        ModelError: they do not.
    """
    question, answer = f"Is 3 + 4 = 7? {tokenizer.spell(tokenizer.end_of_turn[-1:])}", "Yes, it is."
    probe = [Message(role="user", content=question)]
    prompt_ids, completion_ids = tokenizer.render_demonstration(probe, tokenizer.prefill + answer)
    problems = []
    if question not in tokenizer.spell(prompt_ids):
        problems.append(f"the message {question!r} does not survive encoding and decoding")
    if not tokenizer.decode(completion_ids).strip().endswith(answer):
        problems.append(f"the answer {answer!r} comes back as {tokenizer.decode(completion_ids)!r}")
    if completion_ids[-1] not in tokenizer.eos_ids:
        problems.append(f"the answer {answer!r} does not end with one of the EOS ids {list(tokenizer.eos_ids)}")
    if problems:
        raise ModelError(
            "the tokenizer or its chat template fails the round trip: " + "; ".join(problems),
            where=str(tokenizer.hf_tokenizer.name_or_path),
            fix=TEMPLATE_FIX,
        )


def require_same_tokens(tokenizer: ChatTokenizer) -> None:
    """Prove that prompts and demonstrations have the tokens that the library gives them.

    A conversation that the template refuses, or with white space that the tokenizer cannot spell, is passed over: a row
    of that kind is refused when it comes.

    Raises:
        ModelError: the first token that differs, or control tokens of the template that the tokenizer does not read.
    """
    for number, roles in enumerate(_SHAPES):
        try:
            parts = tokenizer.written([Message(role=role, content="7") for role in roles])
        except ModelError:
            continue
        tokenizer.encoder.encode(parts)
        texts = [_TEXTS[(number + place) % len(_TEXTS)] for place in range(len(roles))]
        messages = [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]
        try:
            said = tokenizer.prefill + _ANSWERS[number % len(_ANSWERS)]
            prompt, answer = tokenizer.render_demonstration(messages, said)
        except ModelError:
            continue
        _compare(tokenizer, prompt, _theirs(tokenizer, messages, add_generation_prompt=True), roles)
        whole = _theirs(tokenizer, [*messages, Message(role="assistant", content=said)], add_generation_prompt=False)
        # Templates that leave out a thought, or begin one, write an answer otherwise than it is sampled.
        if whole[: len(prompt)] == prompt and not tokenizer.prefill:
            _compare(tokenizer, (*prompt, *answer), whole[: len(prompt) + len(answer)], (*roles, "assistant"))


def _theirs(tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[int, ...]:
    backend = tokenizer.hf_tokenizer
    ids: list[int] = backend.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        chat_template=template_of(backend),
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )
    return tuple(ids)


def _compare(tokenizer: ChatTokenizer, ours: Sequence[int], theirs: Sequence[int], roles: Sequence[Role]) -> None:
    pairs = enumerate(zip_longest(ours, theirs))
    place = next((place for place, (our, their) in pairs if our != their), None)
    if place is not None:
        our, their = (tokenizer.hf_tokenizer.convert_ids_to_tokens(ids[place : place + 1]) for ids in (ours, theirs))
        raise ModelError(
            f"a conversation of the roles {', '.join(roles)} gets other tokens than apply_chat_template gives it: "
            f"token {place} is {our}, there {their}",
            where=str(tokenizer.hf_tokenizer.name_or_path),
            fix=f"this tokenizer cannot be trained with this template; {TEMPLATE_FIX}",
        )
