"""Rows of gated datasets, as the steps that train and evaluate read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.tasks.store.storage import read_table
from rlcore.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row of ``prompts/v1``, without its split."""

    prompt_id: str
    messages: tuple[Message, ...]
    reference: str
    task: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationRow:
    """One row of ``demonstrations/v1``, without its split."""

    demonstration_id: str
    messages: tuple[Message, ...]
    completion: str
    reference: str
    task: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow:
    """One row of ``preference_pairs/v2``, without its split. ``weight``: how much the pair's set counts."""

    pair_id: str
    set_id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float
    probability: float
    weight: float
    source: str


def read_prompts(path: Path) -> list[PromptRow]:
    """Rows of a gated file of prompts, in its order.

    Raises:
        StorageError: missing or damaged.
    """
    return [PromptRow(**row) for row in _read(path)]


def read_demonstrations(path: Path) -> list[DemonstrationRow]:
    """Rows of a gated file of demonstrations, in its order.

    Raises:
        StorageError: missing or damaged.
    """
    return [DemonstrationRow(**row) for row in _read(path)]


def read_pairs(path: Path) -> list[PairRow]:
    """Rows of a gated file of preference pairs, in its order.

    Raises:
        StorageError: missing or damaged.
    """
    return [PairRow(**row) for row in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    rows = read_table(path).drop(columns="split").to_dict("records")
    return [
        {str(name): value for name, value in row.items()}
        | {"messages": tuple(Message(**message) for message in row["messages"])}
        for row in rows
    ]
