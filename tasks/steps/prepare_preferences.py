"""Preference pairs: read, or sampled from the policy and judged; then the gate and the snapshot of every dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlcore.config import RunConfig
from tasks.pipeline.stages import MODEL, StageContext, StageResult
from tasks.preset.sections import section_of
from tasks.steps.data import POLICY, resolve_adapter, source_digest
from tasks.steps.prepare import prepare
from tasks.steps.sampled_pairs import write_sampled_pairs


def run_prepare_preferences(context: StageContext) -> StageResult:
    """Preference pairs; none of their prompts may be an evaluation prompt."""
    folder, config = context.inputs["sft"] / MODEL, context.config.preferences
    assert config is not None  # without the section there is no such stage
    if resolve_adapter(config) == POLICY:
        path = context.work / "pairs.parquet"
        write_sampled_pairs(context, config, path)
        config = dataclasses.replace(config, adapter="preferences", path=str(path), fallback="", options={})
    return prepare(context, "preferences", config, tokenizer=folder)


def preferences_section(config: RunConfig) -> Mapping[str, Any]:
    """What the pairs depend on: pairs that the policy samples also on the engine and the machine that sample them."""
    assert config.preferences is not None  # as above
    is_sampled = resolve_adapter(config.preferences) == POLICY
    names = ("preferences", "evaluation", *(("engine", "hardware") if is_sampled else ()))
    return {name: section_of(config, name) for name in names}


def preferences_source(config: RunConfig) -> str:
    """Digest of what the preferences are read from."""
    assert config.preferences is not None  # as above
    return source_digest(config.preferences)
