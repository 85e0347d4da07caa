"""Rows of gated datasets and rollout tables, as later steps read them, and prompts as token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcore.errors import CanaryError
from rlcore.tasks.steps.base import StageContext, prepare_stage_name
from rlcore.tasks.store.storage import read_rows, read_table
from rlcore.types import Message, Prompt

if TYPE_CHECKING:
    import pandas as pd

    from rlcore.text.tokenization import ChatTokenizer


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


def tokenize_prompts(
    rows: Sequence[PromptRow], tokenizer: ChatTokenizer, *, dataset: str = "", is_one_of_several: bool = False
) -> list[Prompt]:
    """Return rows with the token ids that the policy sees, including the generation prompt.

    Two datasets may use one id for different prompts, so with several datasets each id begins with the dataset's name.
    """
    scope = f"{dataset}/" if is_one_of_several else ""
    return [
        Prompt(
            prompt_id=scope + row.prompt_id,
            messages=row.messages,
            token_ids=tokenizer.render_prompt(row.messages),
            reference=row.reference,
            task=row.task,
            dataset=dataset,
            columns=row.columns,
            form=row.form,
        )
        for row in rows
    ]


def read_prompt_sets(
    context: StageContext,
    names: Sequence[str],
    split: Literal["train", "eval"],
    tokenizer: ChatTokenizer,
    *,
    limit: int | None = None,
) -> list[Prompt]:
    """Read the prompts of a split, at most ``limit`` per dataset; with several, ids begin with the dataset's name."""
    found: list[Prompt] = []
    for name in names:
        path = context.inputs[prepare_stage_name(name)] / f"{split}.parquet"
        rows = read_prompts(path)[:limit]
        made = tokenize_prompts(rows, tokenizer, dataset=name, is_one_of_several=len(names) > 1)
        _require_own_rows(made, path, scope=f"{name}/" if len(names) > 1 else "")
        found += made
    return found


def _require_own_rows(prompts: Sequence[Prompt], path: Path, *, scope: str) -> None:
    rows = {scope + row["prompt_id"]: row for row in read_rows(path, ("prompt_id", "messages", "reference"))}
    for prompt in prompts:
        row = rows[prompt.prompt_id]
        said = [(message["role"], message["content"]) for message in row["messages"]]
        if prompt.reference != row["reference"] or [(each.role, each.content) for each in prompt.messages] != said:
            raise CanaryError(
                f"prompt {prompt.prompt_id!r} has the reference answer {prompt.reference[:80]!r} or the messages of "
                f"another row; its own reference is {row['reference'][:80]!r}",
                where=str(path),
                fix="check the code that reads rows: answers would be graded against those of other prompts",
            )


def id_in_dataset(prompt: Prompt, *, is_one_of_several: bool) -> str:
    """Return a prompt's id within its dataset, which :func:`tokenize_prompts` appends to the dataset's name."""
    return prompt.prompt_id.removeprefix(f"{prompt.dataset}/") if is_one_of_several else prompt.prompt_id
