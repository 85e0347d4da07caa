"""A tokenizer that counts words, as the gate needs it."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.gate.token_budget import TokenMeter


def words_view(template: int, *, special_tokens: Sequence[str] = ()) -> TokenMeter:
    """One token a word, and ``template`` tokens more for a prompt."""

    def lengths(conversations: Sequence[Messages]) -> list[int]:
        return [template + sum(len(turn["content"].split()) for turn in one) for one in conversations]

    return TokenMeter(
        encode=lambda texts: [[hash(word) for word in text.split()] for text in texts],
        prompt_lengths=lengths,
        max_prompt_tokens=lengths,
        max_text_tokens=lambda text: len(text.split()),
        special_tokens=special_tokens,
    )
