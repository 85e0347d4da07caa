"""Preference pairs: read, or sampled from the policy and judged; then the gate and the snapshot of every dataset."""

from __future__ import annotations

import dataclasses

from rlcore.config import DatasetConfig, RunConfig
from tasks.preset.sections import Sections, sections_of
from tasks.steps.base import MODEL, StageContext, StageResult
from tasks.steps.data import POLICY, resolve_adapter, source_digest
from tasks.steps.prepare import prepare
from tasks.steps.sampled_pairs import write_sampled_pairs


def run_prepare_preferences(context: StageContext) -> StageResult:
    """Preference pairs; none of their prompts may be an evaluation prompt."""
    folder = context.inputs["sft"] / MODEL
    config: DatasetConfig = context.config.preferences
    if resolve_adapter(config) == POLICY:
        path = context.work / "pairs.parquet"
        write_sampled_pairs(context, config, path)
        config = dataclasses.replace(config, adapter="preferences", path=str(path), fallback="", options={})
    return prepare(context, "preferences", config, tokenizer=folder)


def preferences_sections(config: RunConfig) -> Sections:
    """What the pairs are made from: pairs that the policy samples also by an engine, a machine and a verifier."""
    is_sampled = resolve_adapter(config.section("preferences", DatasetConfig)) == POLICY
    return sections_of(config, "preferences", *(("evaluation", "engine", "hardware") if is_sampled else ()))


def preferences_source(config: Sections) -> str:
    """Digest of what the preferences are read from."""
    return source_digest(config.preferences)
