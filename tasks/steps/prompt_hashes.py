"""Hashes of prompts, which keep one dataset's evaluation prompts out of another's training rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rlcore.data_contracts.text import prompt_hash
from rlcore.tasks.steps.rows import PairRow, PromptRow


def prompt_hashes(rows: Iterable[PromptRow | PairRow]) -> frozenset[str]:
    """Return hashes of the normalized prompts."""
    return frozenset(prompt_hash([asdict(message) for message in row.messages]) for row in rows)
