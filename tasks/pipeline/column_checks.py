"""Columns of the rows that reward functions name as parameters, compared with the first rows of the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlcore.config import RewardTerm
from rlcore.rewards.trl_function import lacking
from rlcore.rewards.user_function import columns_needed
from rlcore.tasks.pipeline.reference_checks import first_prompts
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import data_of, rewards_of


def column_errors(config: RunConfig, stages: Collection[str], *, is_evaluated: bool) -> Iterator[str]:
    """Yield reward functions and verifiers that need a column which no row of their datasets has."""
    for name in stages:
        data = data_of(config.stages[name])
        for place, term in enumerate(rewards_of(config.stages[name])):
            yield from _errors(config, f"stages.{name}.rewards.{place}", term, data)
    for place, verifier in enumerate(config.evaluation.verifiers if is_evaluated else ()):
        yield from _errors(config, f"evaluation.verifiers.{place}", verifier.term, evaluated_data(config))


def _errors(config: RunConfig, path: str, term: RewardTerm, data: Collection[str]) -> Iterator[str]:
    """Yield the error of a term, unless the rows of one of its datasets are not known before the run."""
    needed = columns_needed(term) if term.module else []
    names = [name for name in data if not term.data or name in term.data]
    if not needed or not all(name in config.data for name in names):
        return
    rows = [first_prompts(config.data[name]) for name in names]
    columns = {column for found in rows for column in found.columns}
    if all(found.count for found in rows) and (lacks := lacking(needed, columns, term.kind)):
        yield f"{path}: {lacks[0]}; {lacks[1]}"
