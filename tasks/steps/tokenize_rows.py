"""Training texts as token sequences: demonstrations, and both sides of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.tasks.steps.rows import DemonstrationRow, PairRow
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.preferences import TokenPair


def tokenize_demonstrations(rows: Sequence[DemonstrationRow], tokenizer: ChatTokenizer) -> list[Demonstration]:
    """Return token ids and loss masks: each assistant turn is trained on, including its end-of-turn token."""
    return [render_conversation(tokenizer, row.messages, row.completion) for row in rows]


def tokenize_pairs(rows: Sequence[PairRow], tokenizer: ChatTokenizer, *, max_tokens: int) -> list[TokenPair]:
    """Truncate both sides to the token budget. The gate has rejected pairs that become equal."""
    pairs = []
    for row in rows:
        prompt_ids, chosen_ids = tokenizer.render_demonstration(row.messages, row.chosen)
        _, rejected_ids = tokenizer.render_demonstration(row.messages, row.rejected)
        room = max_tokens - len(prompt_ids)
        pairs.append(
            TokenPair(
                prompt_ids=prompt_ids,
                chosen_ids=chosen_ids[:room],
                rejected_ids=rejected_ids[:room],
                set_id=row.set_id,
                margin=row.margin,
                probability=row.probability,
                weight=row.weight,
            )
        )
    return pairs
