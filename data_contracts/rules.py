"""Rules of a whole dataset: functions of its rows with their ``prompt_hash`` to (value, ok) and a detail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pandas as pd

from data_contracts.contract import Contract
from data_contracts.text import word_ngrams

NGRAM_WORDS = 13  # the usual length for contamination (GPT-3, appendix C)


class Outcome(NamedTuple):
    """What a rule found: a figure for the report, whether that is right, and the first offender in words."""

    value: float
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetRule:
    """``error``: the dataset is refused. ``warning``: it goes through, and the report says so.

    ``rows``: those that the rule looks at. What is wrong with a file is wrong however many of its rows are asked for,
    so such a rule looks at all ``accepted`` rows; others say what training gets, and look at those that are ``kept``.
    """

    name: str
    check: Callable[[pd.DataFrame], Outcome]
    severity: Literal["error", "warning"]
    rows: Literal["accepted", "kept"]


def dataset_rules(
    contract: Contract, *, num_train: int, num_eval: int, forbidden: Collection[str]
) -> tuple[DatasetRule, ...]:
    """The rules for one contract; ``forbidden``: hashes of prompts that another dataset evaluates on."""
    rules = [
        _file_rule("unique_ids", lambda frame: unique_ids(frame, contract.id_column)),
        _file_rule("train_and_eval_share_no_prompt", disjoint_prompts),
        _file_rule("train_holds_no_foreign_eval_prompt", lambda frame: no_forbidden_prompts(frame, forbidden)),
        DatasetRule(name="both_splits_have_rows", check=filled_splits, severity="error", rows="kept"),
        _warning("as_many_rows_as_asked", lambda frame: enough_rows(frame, num_train, num_eval)),
        _warning("rows_differ", lambda frame: distinct_rows(frame, contract.answers)),
        _warning(f"eval_shares_no_{NGRAM_WORDS}_words", ngram_overlap),
    ]
    if "rejected" in contract.answers:
        rules.append(_warning("chosen_is_longer", length_balance))
    return tuple(rules)


def _file_rule(name: str, check: Callable[[pd.DataFrame], Outcome]) -> DatasetRule:
    return DatasetRule(name=name, check=check, severity="error", rows="accepted")


def _warning(name: str, check: Callable[[pd.DataFrame], Outcome]) -> DatasetRule:
    return DatasetRule(name=name, check=check, severity="warning", rows="kept")


def unique_ids(frame: pd.DataFrame, column: str) -> Outcome:
    """Number of rows whose id an earlier row has."""
    repeated = frame.loc[frame[column].duplicated(), column]
    return Outcome(len(repeated), repeated.empty, f"the first is {repeated.iloc[0]!r}" if len(repeated) else "")


def disjoint_prompts(frame: pd.DataFrame) -> Outcome:
    """Number of prompts, by the hash of their normalised text, that are trained on and evaluated on."""
    train = frame[frame["split"] == "train"]
    shared = train[train["prompt_hash"].isin(frame.loc[frame["split"] == "eval", "prompt_hash"])]
    return Outcome(shared["prompt_hash"].nunique(), shared.empty, _first_prompt(shared))


def no_forbidden_prompts(frame: pd.DataFrame, forbidden: Collection[str]) -> Outcome:
    """Number of training prompts that another dataset evaluates on."""
    found = frame[(frame["split"] == "train") & frame["prompt_hash"].isin(list(forbidden))]
    return Outcome(found["prompt_hash"].nunique(), found.empty, _first_prompt(found))


def filled_splits(frame: pd.DataFrame) -> Outcome:
    """Number of splits without a row."""
    empty = [split for split in ("train", "eval") if not (frame["split"] == split).any()]
    return Outcome(len(empty), not empty, f"no rows for {' and '.join(empty)}" if empty else "")


def enough_rows(frame: pd.DataFrame, num_train: int, num_eval: int) -> Outcome:
    """Kept rows as a share of those that were asked for."""
    counts = frame["split"].value_counts()
    sides = (("train", num_train, "for training"), ("eval", num_eval, "held out"))
    detail = ", ".join(f"{counts.get(split, 0):,} of {asked:,} {words}" for split, asked, words in sides)
    share = len(frame) / (num_train + num_eval)
    return Outcome(share, share >= 1.0, detail)


def distinct_rows(frame: pd.DataFrame, answers: Iterable[str]) -> Outcome:
    """Number of rows with the prompt and the answers of an earlier row."""
    repeated = frame[frame.duplicated(["prompt_hash", *answers])]
    return Outcome(len(repeated), repeated.empty, _first_prompt(repeated))


def ngram_overlap(frame: pd.DataFrame) -> Outcome:
    """Share of evaluation prompts with a run of 13 words that stands in a training prompt too."""
    held_out = [set(_prompt_ngrams(messages)) for messages in frame.loc[frame["split"] == "eval", "messages"]]
    wanted = set().union(*held_out)
    train = frame.loc[frame["split"] == "train", "messages"]
    seen = {ngram for messages in train for ngram in _prompt_ngrams(messages) if ngram in wanted} if wanted else set()
    touched = sum(1 for ngrams in held_out if ngrams & seen)
    return Outcome(touched / max(1, len(held_out)), touched == 0, f"{touched} of {len(held_out)} prompts")


def length_balance(frame: pd.DataFrame) -> Outcome:
    """Share of pairs in which the chosen side has more characters; a reward model that beats it learnt more."""
    longer = float((frame["chosen"].str.len() > frame["rejected"].str.len()).mean())
    return Outcome(longer, 0.2 <= longer <= 0.8, "far from one half: length alone tells the sides apart")


def _prompt_ngrams(messages: list[dict[str, str]]) -> Iterable[str]:
    return (ngram for turn in messages if turn["role"] == "user" for ngram in word_ngrams(turn["content"], NGRAM_WORDS))


def _first_prompt(frame: pd.DataFrame) -> str:
    return f"the first is {frame['messages'].iloc[0][-1]['content'][:120]!r}" if len(frame) else ""
