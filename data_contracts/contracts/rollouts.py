"""``rollouts/v3`` and ``scores/v1``: samples and scores of an iteration, in one table."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict

import numpy as np
import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import (
    each,
    filled,
    is_list_of_booleans,
    is_list_of_counts,
    is_list_of_logprobs,
    known_finish_reason,
    rule,
)
from rlcore.data_contracts.contracts.contract import Contract, require
from rlcore.data_contracts.errors import ContractError

KEYS = ("iteration", "prompt_id", "sample_index", "branch")


class Rollouts(pa.DataFrameModel):
    """One row per sample, exactly as sampled; ``completion_ids`` and the two lists after it have an entry per token.

    An episode with several samples has a row each: ``branch`` is 0 for the one with the last answer, then 1, 2, …, with
    the reason in ``fork``. They follow one another and share the score. A token is trained where ``loss_mask`` is true,
    which for every sampled token is one row. ``prompt_ids``: tokens of a prompt that an agent wrote, else empty.
    ``calls``: JSON list of the earlier turns, each as [text, tool, output, is_error].

    ``sampler_logprobs``: natural logarithms of the tempered distribution, as reported by the engine. ``loss_mask``:
    false on tool output. ``policy_version``: of the weights that sampled. ``replica``: number of the engine that
    sampled. ``replaced``: dynamic sampling replaced the zero-signal group by another prompt's, so it was not trained
    on.
    """

    iteration: int
    prompt_id: str
    sample_index: int
    prompt: str
    reference: str
    text: str
    branch: int
    fork: str
    calls: str
    prompt_ids: object
    completion_ids: object
    sampler_logprobs: object
    loss_mask: object
    policy_version: int
    replica: int
    finish_reason: str
    replaced: bool

    class Config:
        strict = True
        name = "rollouts/v3"

    counts_are_counts = rule(
        lambda values: values >= 0,
        "iteration",
        "sample_index",
        "branch",
        "policy_version",
        "replica",
        error="must be at least 0",
    )
    names_are_filled = filled("prompt_id")
    completion_is_tokens = each(is_list_of_counts, "completion_ids", error="must be token ids, at least one")
    prompt_is_tokens = each(
        lambda value: value == [] or is_list_of_counts(value), "prompt_ids", error="must be token ids"
    )
    calls_are_calls = each(
        lambda text: _are_calls(text), "calls", error="must be a JSON list of [text, tool, output, is_error]"
    )
    branches_have_a_reason = rule(
        lambda frame: (frame["branch"] > 0) == (frame["fork"] != ""),
        error="fork must be the reason of a branch, and empty if branch is 0",
    )
    logprobs_are_logprobs = each(is_list_of_logprobs, "sampler_logprobs", error="must be finite and at most 0")
    mask_is_boolean = each(is_list_of_booleans, "loss_mask", error="must be true or false")
    finish_reason_is_known = known_finish_reason("finish_reason")

    lists_are_aligned = rule(
        lambda frame: (
            _lengths(frame, "sampler_logprobs").eq(_lengths(frame, "completion_ids"))
            & _lengths(frame, "loss_mask").eq(_lengths(frame, "completion_ids"))
        ),
        error="completion_ids, sampler_logprobs and loss_mask differ in length",
    )


class Scores(pa.DataFrameModel):
    """One row per sample: the total reward, or null and the grader's error; ``parts``: JSON, components by name."""

    iteration: int
    prompt_id: str
    sample_index: int
    value: float = pa.Field(nullable=True)
    parts: str
    error: str

    class Config:
        strict = True
        name = "scores/v1"

    value_is_finite = rule(lambda values: values.abs() < np.inf, "value", error="must be finite")
    parts_are_numbers = each(lambda text: _are_parts(text), "parts", error="must be a JSON object of finite numbers")
    unscored_has_an_error = rule(
        lambda frame: frame["value"].notna() | (frame["error"] != ""), error="has neither a value nor an error"
    )


ROLLOUTS = Contract(name="rollouts/v3", model=Rollouts, id_column="prompt_id", answers=("text",))
SCORES = Contract(name="scores/v1", model=Scores, id_column="prompt_id")


def check_rollouts(frame: pd.DataFrame) -> None:
    """Reject a table of scored rollouts (the columns of both contracts) that breaks one, or has incomplete groups.

    Raises:
        ContractError: naming the first invalid rows or groups.
    """
    unknown = set(frame.columns) - {*ROLLOUTS.columns, *SCORES.columns}
    if unknown:
        raise ContractError(f"{ROLLOUTS.name}: unknown columns {sorted(unknown)}", where=ROLLOUTS.name)
    for contract in (ROLLOUTS, SCORES):
        require(frame[[name for name in contract.columns if name in frame]], contract)
    broken = incomplete_groups(frame)
    if broken:
        raise ContractError(
            f"{ROLLOUTS.name}: the samples or branches of {len(broken)} groups are not numbered 0, 1, 2, …; "
            f"the first is {broken[0]}",
            where=ROLLOUTS.name,
        )


def incomplete_groups(frame: pd.DataFrame) -> list[tuple[int, str]]:
    """Return (iteration, prompt_id) of the groups with a gap in their sample indices, or in an episode's branches.

    A prompt may be drawn twice in an iteration, at the end of one epoch and the start of the next. So index 0 must
    exist, and none may occur more often than the one before.
    """
    groups: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    episodes: defaultdict[tuple[int, str, int], Counter[int]] = defaultdict(Counter)
    for iteration, prompt_id, index, branch in zip(*(frame[name].tolist() for name in KEYS), strict=True):
        groups[iteration, prompt_id][index] += branch == 0
        episodes[iteration, prompt_id, index][branch] += 1
    gaps = {group for group, counts in groups.items() if _has_hole(counts)}
    return sorted(gaps | {episode[:2] for episode, counts in episodes.items() if _has_hole(counts)})


def _has_hole(counts: Counter[int]) -> bool:
    """Find a gap in counts of indices: {0: 2, 1: 1} has none, {0: 1, 2: 1} lacks 1, {0: 1, 1: 2} lacks a second 0."""
    times = [counts[index] for index in range(len(counts))]
    return 0 in times or times != sorted(times, reverse=True)


def _lengths(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name].map(len)


def _are_calls(text: object) -> bool:
    try:
        calls = json.loads(str(text))
    except ValueError:
        return False
    return isinstance(calls, list) and all(
        isinstance(call, list) and [*map(type, call)] == [str, str, str, bool] for call in calls
    )


def _are_parts(text: object) -> bool:
    try:
        parts = json.loads(str(text))
    except ValueError:
        return False
    return isinstance(parts, dict) and all(
        type(part) in (int, float) and math.isfinite(part) for part in parts.values()
    )
