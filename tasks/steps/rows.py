"""Rows of gated datasets and rollout tables, as later steps read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcore.data_contracts.text import prompt_hash
from rlcore.tasks.store.storage import read_table
from rlcore.types import Message

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """Row of ``prompts/v1`` without its split, and what travels with it; see :class:`rlcore.types.Prompt`."""

    prompt_id: str
    messages: tuple[Message, ...]
    reference: str
    task: str
    columns: str = ""
    form: Literal["text", "messages"] = "messages"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationRow:
    """Row of ``demonstrations/v1`` without its split."""

    demonstration_id: str
    messages: tuple[Message, ...]
    completion: str
    reference: str
    task: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow:
    """Row of ``preference_pairs/v2`` without its split. ``weight``: weight of the pair's set."""

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
    """Read a gated file of prompts, in its order; a :class:`StorageError` if it is missing or damaged."""
    return [PromptRow(**row) for row in _read(path)]


def read_demonstrations(path: Path) -> list[DemonstrationRow]:
    """Read a gated file of demonstrations, as :func:`read_prompts`."""
    return [DemonstrationRow(**row) for row in _read(path)]


def read_pairs(path: Path) -> list[PairRow]:
    """Read a gated file of preference pairs, as :func:`read_prompts`."""
    return [PairRow(**row) for row in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    rows = read_table(path).drop(columns="split").to_dict("records")
    return [
        {str(name): value for name, value in row.items()}
        | {"messages": tuple(Message(**message) for message in row["messages"])}
        for row in rows
    ]


def read_episodes(path: Path) -> pd.DataFrame:
    """Read the episodes of a rollout table; a column ``forks`` lists the reasons of each one's branches.

    Tables of ``rollouts/v2`` have a row per episode, and no branches.
    """
    table = read_table(path)
    forks: list[Any] = [[] for _ in range(len(table))]
    if "branch" in table:
        is_episode = table["branch"] == 0
        forks = [[*reasons][1:] for _, reasons in table["fork"].groupby(is_episode.cumsum())]
        table = table[is_episode]
    return table.assign(forks=forks)


def prompt_hashes(rows: Iterable[PromptRow | PairRow]) -> frozenset[str]:
    """Return hashes of the normalized prompts."""
    return frozenset(prompt_hash([asdict(message) for message in row.messages]) for row in rows)
