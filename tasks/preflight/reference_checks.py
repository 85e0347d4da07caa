"""Datasets without reference answers, found from their first rows, and settings that need them.

A reward model, a judge or a format reward needs none. A verifier does, and so does any use of accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.config import to_dict
from rlcore.data_contracts.errors import ContractError
from rlcore.errors import DataError
from rlcore.rewards.base import VERIFIERS
from rlcore.strict_config import build
from rlcore.tasks.kinds.win_rate.kind import DISJOINT, WinRateStage, shared_pairs
from rlcore.tasks.preflight.model_checks import code_state
from rlcore.tasks.presets.data import HUB, DatasetConfig
from rlcore.tasks.presets.graph import data_of, evaluated_data, rewards_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import NO_ACCURACY
from rlcore.tasks.steps.data_source import adapter_code, has_files, is_generated, rows_sha256
from rlcore.tasks.store.remembered import remembered

ROWS_LOOKED_AT = 200


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
    """Yield promotions by accuracy if accuracy cannot be measured, or by a judge that knows the reward's pairs."""
    names = evaluated_data(config)
    if config.promotion and config.promotion.win_rate:
        own = config.stages.get(config.promotion.win_rate)
        if isinstance(own, WinRateStage):  # if not, the graph has an error
            for reason in shared_pairs(config, replace(own, policy=config.promotion.challenger)):
                yield f"promotion.win_rate = {config.promotion.win_rate!r}: {reason}; {DISJOINT}"
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
    bare = without_references(config, names)
    return [name for name in names if not config.evaluation.grades(name, has_reference=name not in bare)]


def without_references(config: RunConfig, names: Collection[str]) -> set[str]:
    """Return the datasets whose first rows can be read and have no reference answer."""
    found = {name: first_prompts(config.data[name]) for name in names if config.data[name].has_prompts}
    return {name for name, rows in found.items() if rows.count and not rows.have_reference}


@dataclass(frozen=True, kw_only=True)
class FirstPrompts:
    """First prompts of a file: their number, True if one has a reference answer, and the columns of their rows."""

    count: int = 0
    have_reference: bool = False
    columns: tuple[str, ...] = ()


def first_prompts(data: DatasetConfig) -> FirstPrompts:
    """Return what the first prompts of a file have; none if it does not exist or cannot be read."""
    if not data.path or data.path.startswith(HUB):
        return FirstPrompts()
    try:
        if not has_files(data.path):
            return FirstPrompts()
        if is_generated(data.reader):
            return FirstPrompts()
        spelled = json.dumps(to_dict(replace(data, eval_path="", num_train=1, num_eval=1, max_tokens=1)))
        found = _first_prompts(spelled, rows_sha256(data.path), adapter_code(data.reader), code_state())
    except (ContractError, DataError, OSError):  # the gate reports the details
        return FirstPrompts()
    return FirstPrompts(**{**found, "columns": tuple(found["columns"])})


@remembered
def _first_prompts(spelled: str, digest: str, adapter: str, code: str) -> dict[str, Any]:
    """Return :class:`FirstPrompts` as JSON."""
    from rlcore.data_contracts.adapters.convert import first_rows  # brings pandera
    from rlcore.data_contracts.gate.reading import read_source

    data = build(DatasetConfig, json.loads(spelled))
    source, columns = read_source(Path(data.path)), data.mapping.columns
    rows = first_rows(source, "prompts", adapter=data.reader, columns=columns, limit=ROWS_LOOKED_AT).rows
    names = {column for row in rows for column in json.loads(row.get("columns") or "{}")}
    has_reference = any(row["reference"].strip() for row in rows)
    return {"count": len(rows), "have_reference": has_reference, "columns": sorted(names)}
