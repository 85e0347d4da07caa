"""Preference pairs of a stage that trains on them, a reward model or DPO: rows, tokens, halves, margins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.base import StageContext, prepare_stage_name
from rlcore.tasks.steps.rows import PairRow, read_pairs
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.preferences import TokenPair, different_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class PairData:
    """Training and held-out pairs as tokens; ``rows``: the training rows of the snapshots."""

    rows: list[PairRow]
    train: list[TokenPair]
    held_out: list[TokenPair]


def read_pair_data(context: StageContext, tokenizer: ChatTokenizer) -> PairData:
    """Read the pairs of all datasets of the stage; of training pairs the half that a stage may name.

    Raises:
        DataError: there are no training pairs, or none held out.
    """
    data: Mapping[str, DatasetConfig] = {name: context.config.data[name] for name in context.config.stage.data}
    half = getattr(context.config.stage, "half", "all")
    rows: dict[str, list[PairRow]] = {"train": [], "eval": []}
    pairs: dict[str, list[TokenPair]] = {"train": [], "eval": []}
    for name, config in data.items():
        for split in rows:
            found = read_pairs(context.inputs[prepare_stage_name(name)] / f"{split}.parquet")
            if split == "train":
                found = [row for row in found if half in ("all", half_of(row))]
            rows[split] += found
            pairs[split] += [  # two datasets may use one id for different sets
                replace(pair, set_id=f"{name}/{pair.set_id}")
                for pair in tokenize_pairs(found, tokenizer, max_tokens=config.max_tokens)
            ]
    for split, number in (("train", "num_train"), ("eval", "num_eval")):
        if not rows[split]:
            raise DataError(
                f"there are no preference pairs to {'train' if split == 'train' else 'evaluate'} on",
                where=", ".join(f"data.{name}.{number}" for name in data),
                fix="add pairs with more different prompts: all pairs of a prompt are on the same side of the split",
            )
    return PairData(rows=rows["train"], train=pairs["train"], held_out=pairs["eval"])


def half_of(row: PairRow) -> Literal["first", "second"]:
    """Return the half of all prompts that a pair's belongs to, by a hash of its messages."""
    messages = json.dumps([[message.role, message.content] for message in row.messages])
    return "second" if hashlib.sha256(messages.encode()).digest()[0] % 2 else "first"


def read_gold_pairs(context: StageContext, tokenizer: ChatTokenizer) -> list[TokenPair]:
    """Read the stage's gold pairs, of both splits: it trains on neither.

    Raises:
        DataError: gold_pairs are named but have no pair.
    """
    found: list[TokenPair] = []
    for name in context.config.stage.gold_pairs:
        for split in ("train", "eval"):
            rows = read_pairs(context.inputs[prepare_stage_name(name)] / f"{split}.parquet")
            found += tokenize_pairs(rows, tokenizer, max_tokens=context.config.data[name].max_tokens)
    if context.config.stage.gold_pairs and not found:
        raise DataError(
            "gold_pairs have no pair, so nothing shows which side the reward model prefers",
            where=f"stages.{context.stage}.gold_pairs",
            fix="name datasets with pairs whose winners are known, or leave gold_pairs out",
        )
    return found


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


def margins_of(scores: NDArray[np.float64], pairs: Sequence[TokenPair]) -> NDArray[np.float64]:
    """Return score(chosen) - score(rejected) of each pair [P]; ``scores`` [S]: of :func:`different_sequences`."""
    place = {sequence: number for number, sequence in enumerate(different_sequences(pairs))}
    chosen, rejected = ([place[pair.sides[side]] for pair in pairs] for side in (0, 1))
    margins: NDArray[np.float64] = scores[chosen] - scores[rejected]
    return margins


def numbered(items: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return a number for each item, equal for equal items: the prompts of pairs, by which these are dependent."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return np.array([numbers[item] for item in items], dtype=np.int64)
