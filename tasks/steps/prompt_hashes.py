"""Hashes of prompts, which keep one dataset's evaluation prompts out of another's training rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlcore.data_contracts.text import prompt_hash
from rlcore.tasks.steps.rows import PairRow, PromptRow
from rlcore.types import Message


def prompt_hashes(rows: Iterable[PromptRow | PairRow]) -> frozenset[str]:
    """Return hashes of the normalized prompts."""
    return frozenset(prompt_hash(_turns(row.messages)) for row in rows)


def _turns(messages: Sequence[Message]) -> list[Mapping[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
