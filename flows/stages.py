"""The stages of post-training and what each depends on, as data. Flows name targets; the order follows from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlcore.config import RunConfig
from tasks.compare import run_compare
from tasks.episodes import evaluation_corpus, evaluation_section
from tasks.evaluate import run_evaluate
from tasks.import_sft import run_import_sft, source_files
from tasks.online_rl import run_online_rl
from tasks.prepare import (
    demonstrations_source,
    preferences_source,
    prompts_source,
    run_prepare_demonstrations,
    run_prepare_preferences,
    run_prepare_prompts,
)
from tasks.reward_model import run_reward_model
from tasks.rl_run import outside, uses_reward_model
from tasks.sft import run_sft
from tasks.stages import Stage

DATASETS = ("prepare_prompts", "prepare_demonstrations", "prepare_preferences")


def stages(config: RunConfig) -> tuple[Stage, ...]:
    """Every stage of a run; which RL runs there are, and whether they need the reward model, the preset says."""
    checkpoints = {"base": "import_sft", "sft": "sft"} | {name: name for name in config.runs}
    return (
        Stage(
            name="import_sft",
            version=1,
            kind="checkpoint",
            run=run_import_sft,
            section=_sections("model"),
            external=source_files,
        ),
        Stage(
            name="prepare_prompts",
            version=1,
            kind="dataset",
            run=run_prepare_prompts,
            inputs=("import_sft",),
            section=_sections("prompts"),
            external=prompts_source,
        ),
        Stage(
            name="prepare_demonstrations",
            version=1,
            kind="dataset",
            run=run_prepare_demonstrations,
            inputs=("import_sft", "prepare_prompts"),
            section=_sections("demonstrations"),
            external=demonstrations_source,
        ),
        Stage(
            name="sft",
            version=1,
            kind="checkpoint",
            run=run_sft,
            inputs=("import_sft", "prepare_demonstrations"),
            section=_sections("sft", "hardware"),
        ),
        Stage(
            name="prepare_preferences",
            version=1,
            kind="dataset",
            run=run_prepare_preferences,
            inputs=("sft", "prepare_prompts"),
            section=_sections("preferences", "evaluation"),
            external=preferences_source,
        ),
        Stage(
            name="reward_model",
            version=1,
            kind="reward_model",
            run=run_reward_model,
            inputs=("sft", "prepare_preferences"),
            section=_sections("reward_model", "preferences", "hardware"),
        ),
        *(_online_rl(name, config) for name in config.runs),
        *(_evaluate(name, checkpoint) for name, checkpoint in checkpoints.items()),
        Stage(
            name="compare",
            version=1,
            kind="comparison",
            run=run_compare,
            inputs=(*(f"evaluate_{name}" for name in checkpoints), *config.runs, "reward_model"),
            section=_sections("name", "runs"),
        ),
    )


def _online_rl(name: str, config: RunConfig) -> Stage:
    reward_model = ("reward_model",) if uses_reward_model(getattr(config, name)) else ()
    return Stage(
        name=name,
        version=1,
        kind="policy",
        run=partial(run_online_rl, section=name),
        inputs=("sft", "prepare_prompts", *reward_model),
        section=_sections(name, "evaluation", "hardware"),
        external=partial(outside, section=name),
    )


def _evaluate(name: str, checkpoint: str) -> Stage:
    return Stage(
        name=f"evaluate_{name}",
        version=1,
        kind="evaluation",
        run=partial(run_evaluate, checkpoint=checkpoint),
        inputs=(checkpoint, "prepare_prompts"),
        section=evaluation_section,
        external=evaluation_corpus,
    )


def _sections(*names: str) -> Callable[[RunConfig], Mapping[str, Any]]:
    """The named sections of the preset; threads, device and precision change the last bits of what is computed."""
    return partial(_pick, names)


def _pick(names: tuple[str, ...], config: RunConfig) -> Mapping[str, Any]:
    return {name: getattr(config, name) for name in names}
