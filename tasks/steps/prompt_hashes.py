"""Hashes of prompts, by which one dataset's evaluation is kept out of another's training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlcore.data_contracts.text import prompt_hash
from rlcore.tasks.steps.rows import PairRow, PromptRow
from rlcore.types import Message


def prompt_hashes(rows: Iterable[PromptRow | PairRow]) -> frozenset[str]:
    """Hashes of the normalised prompts, to keep them out of another dataset's training rows."""
    return frozenset(prompt_hash(_turns(row.messages)) for row in rows)


def _turns(messages: Sequence[Message]) -> list[Mapping[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
