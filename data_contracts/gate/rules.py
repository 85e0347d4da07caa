"""Rules of a whole dataset: functions of its rows as numbers to (value, ok) and a detail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate.ledger import EVAL, NO_ROWS, TRAIN, Column, Ledger, Mask, Numbers, Rows


class RuleOutcome(NamedTuple):
    """Result of a rule: a value for the report, True if it is valid, and a sentence if it is not.

    ``rows``: those of ``detail``, the sentence, as ``{0}``, ``{1}``, …, formatted with :class:`RowSummary`.
    """

    value: float
    ok: bool
    detail: str = ""
    rows: Rows = NO_ROWS


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """Rows as the rules see them: which were accepted, which of these are kept, and the side of each.

    ``prompts``: of each row, the row that represents all with the same prompt. ``evaluated``: keys of evaluation
    prompts of other datasets.
    """

    ledger: Ledger
    contract: Contract
    split: Column
    prompts: Rows
    is_accepted: Mask
    is_kept: Mask
    evaluated: Numbers
    num_train: int
    num_eval: int


@dataclass(frozen=True, kw_only=True)
class DatasetRule:
    """Rule with its severity. ``error``: the dataset is rejected. ``warning``: the report shows it.

    An error examines all accepted rows, whatever number is requested, except for empty sides: a broken file is broken.
    A warning examines the kept rows, which training uses.
    """

    name: str
    check: Callable[[DatasetState], RuleOutcome]
    severity: Literal["error", "warning"]


def dataset_rules(contract: Contract) -> tuple[DatasetRule, ...]:
    """Return the rules for one contract."""
    rules = [
        DatasetRule(name="unique_ids", check=unique_ids, severity="error"),
        DatasetRule(name="train_and_eval_share_no_prompt", check=disjoint_prompts, severity="error"),
        DatasetRule(name="train_holds_no_foreign_eval_prompt", check=no_foreign_prompts, severity="error"),
        DatasetRule(name="both_splits_have_rows", check=filled_splits, severity="error"),
        DatasetRule(name="as_many_rows_as_asked", check=enough_rows, severity="warning"),
        DatasetRule(name="rows_differ", check=distinct_rows, severity="warning"),
    ]
    if "rejected" in contract.answers:
        rules.append(DatasetRule(name="chosen_is_longer", check=length_balance, severity="warning"))
    return tuple(rules)


def unique_ids(state: DatasetState) -> RuleOutcome:
    """Count the rows whose id an earlier row has."""
    rows = np.flatnonzero(state.is_accepted)
    repeated = rows[~_is_first(state.ledger.name[rows])]
    return _outcome(repeated, len(repeated), "rows with the id of an earlier row", "{0.name!r} in {0.place}")


def disjoint_prompts(state: DatasetState) -> RuleOutcome:
    """Count the prompts, in any spelling, that are in both splits."""
    train, held_out = (np.flatnonzero(state.is_accepted & (state.split == side)) for side in (TRAIN, EVAL))
    keys = state.ledger.key
    shared = train[np.isin(keys[train], keys[held_out])]
    others = held_out[np.isin(keys[held_out], keys[shared[:1]])]
    first = "{0.prompt!r} in {0.place}, and {1.prompt!r} in {1.place} is held out"
    rows = np.append(shared[:1], others[:1])
    return _outcome(rows, len(np.unique(keys[shared])), "prompts both for training and held out", first)


def no_foreign_prompts(state: DatasetState) -> RuleOutcome:
    """Count the training prompts that another dataset evaluates on."""
    train = np.flatnonzero(state.is_accepted & (state.split == TRAIN))
    found = train[np.isin(state.ledger.key[train], state.evaluated)]
    count = len(np.unique(state.ledger.key[found]))
    return _outcome(found, count, "training prompts that another dataset evaluates on", "{0.prompt!r} in {0.place}")


def filled_splits(state: DatasetState) -> RuleOutcome:
    """Count the splits without a row."""
    empty = [
        name for name, side in (("train", TRAIN), ("eval", EVAL)) if not (state.split[state.is_kept] == side).any()
    ]
    detail = f"no rows for {' and '.join(empty)}; distinct rows that are left: {state.is_kept.sum():,}"
    return RuleOutcome(len(empty), not empty, detail if empty else "")


def enough_rows(state: DatasetState) -> RuleOutcome:
    """Return the kept rows as a fraction of the requested ones."""
    sides = ((TRAIN, state.num_train, "for training"), (EVAL, state.num_eval, "held out"))
    counts = {side: int((state.split[state.is_kept] == side).sum()) for side in (TRAIN, EVAL)}
    parts = ", ".join(f"{counts[side]:,} of {asked:,} {words}" for side, asked, words in sides)
    detail = f"there are fewer rows than requested: {parts}"
    share = sum(counts.values()) / (state.num_train + state.num_eval)
    return RuleOutcome(share, share >= 1.0, detail)


def distinct_rows(state: DatasetState) -> RuleOutcome:
    """Count the rows with the prompt and the answers of an earlier row."""
    rows = np.flatnonzero(state.is_kept)
    contents = np.column_stack([state.prompts[rows].astype(np.uint64), state.ledger.answers[rows]])
    repeated = rows[~_is_first(np.ascontiguousarray(contents).view([("", np.uint64)] * contents.shape[1])[:, 0])]
    return _outcome(repeated, len(repeated), "rows with the prompt and the answers of an earlier row", "{0.prompt!r}")


def length_balance(state: DatasetState) -> RuleOutcome:
    """Return the fraction of pairs whose chosen side has more characters, which a reward model must beat.

    Of pairs with sides of equal length, half are counted.
    """
    longer = float((state.ledger.longer[state.is_kept].mean() + 1.0) / 2.0)
    detail = f"the chosen side is longer in {longer:.0%} of the pairs: length alone tells the sides apart"
    return RuleOutcome(longer, 0.2 <= longer <= 0.8, detail)


def _outcome(rows: Rows, count: int, what: str, first: str) -> RuleOutcome:
    """Return a count of offenders; ``first`` formats the first of ``rows``."""
    return RuleOutcome(count, not count, f"{what}: {count:,}; the first is {first}" if count else "", rows[:2])


def _is_first(values: Column) -> Mask:
    _, first = np.unique(values, return_index=True)
    is_first = np.zeros(len(values), dtype=bool)
    is_first[first] = True
    return is_first
