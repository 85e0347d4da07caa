"""Token view of a tokenizer that counts words, as the gate needs it."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.tasks.steps.data import TokenView
from rlcore.types import Message


def words_view(template: int, *, special_tokens: Sequence[str] = ()) -> TokenView:
    """One token a word, and ``template`` tokens more for a prompt."""

    def lengths(conversations: Sequence[Sequence[Message]]) -> list[int]:
        return [template + sum(len(message.content.split()) for message in one) for one in conversations]

    return TokenView(
        encode=lambda texts: [[hash(word) for word in text.split()] for text in texts],
        prompt_lengths=lengths,
        max_prompt_tokens=lengths,
        max_text_tokens=lambda text: len(text.split()),
        special_tokens=special_tokens,
    )
