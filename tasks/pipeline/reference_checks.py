"""Datasets without reference answers, found from their first rows, and settings that need them.

A reward model, a judge or a format reward needs none. A verifier does, and so does any use of accuracy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcore.checks.canaries.rewards import VERIFIERS
from rlcore.data_contracts.adapters.convert import first_rows, is_generator
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.reading import read_source
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.presets.evaluation import NO_ACCURACY
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import data_of, rewards_of

ROWS_LOOKED_AT = 200
_PROMOTING = ("promote", "reward_gate", "drift")


def reference_errors(config: RunConfig, stages: Collection[str], data: Collection[str]) -> Iterator[str]:
    """Yield verifiers as rewards on data without reference answers."""
    bare = without_references(config, data)
    for name in stages:
        stage = config.stages[name]
        for place, term in enumerate(rewards_of(stage)):
            on = [each for each in data_of(stage) if not term.data or each in term.data]
            if term.kind in VERIFIERS and on and all(each in bare for each in on):
                yield (
                    f"stages.{name}.rewards.{place}: {term.kind!r} compares answers with references, and the rows of "
                    f"{', '.join(on)} have none; give them some, or take another reward"
                )


def promotion_reference_errors(config: RunConfig) -> Iterator[str]:
    """Yield promotions by accuracy if accuracy cannot be measured."""
    names = evaluated_data(config)
    if config.promotion and config.promotion.win_rate:
        return
    if names and len(_ungraded(config, names)) == len(names):
        yield (
            f"promotion: is decided by accuracy, and the rows of {', '.join(names)} have no references; {NO_ACCURACY}"
        )


def unmeasured_line(config: RunConfig, data: Collection[str]) -> list[str]:
    """Yield a sentence if evaluations cannot report accuracy."""
    names = [name for name in evaluated_data(config) if name in data]
    bare = _ungraded(config, names)
    return [f"evaluation: no accuracy on {', '.join(bare)}, whose rows have no references"] if bare else []


def _ungraded(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Return the datasets without the references that their verifiers need."""
    bare = without_references(config, names)
    return [name for name in names if not config.evaluation.grades(name, has_reference=name not in bare)]


def without_references(config: RunConfig, names: Collection[str]) -> set[str]:
    """Return the datasets whose first rows can be read and have no reference answer."""
    found = {name: first_prompts(config.data[name]) for name in names if config.data[name].has_prompts}
    return {name for name, rows in found.items() if rows and not any(row["reference"].strip() for row in rows)}


def first_prompts(data: DatasetConfig) -> list[dict[str, Any]]:
    """Return the first prompts of a file in contract columns; empty if it does not exist or none can be read."""
    path = Path(data.path)
    if not data.path or data.path.startswith("hub:") or not path.is_file():
        return []
    try:
        if is_generator(data.reader):
            return []
        source, columns = read_source(path), data.mapping.columns
        found = first_rows(source, "prompts", adapter=data.reader, columns=columns, limit=ROWS_LOOKED_AT)
    except ContractError:  # the gate reports the details
        return []
    return found.rows
