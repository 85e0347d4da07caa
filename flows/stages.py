"""The stages of post-training and what each depends on, as data. Flows name targets; the order follows from here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlcore.config import PromotionConfig, RlConfig, RunConfig
from rlcore.errors import ConfigError
from tasks.pipeline.retrain import Past
from tasks.pipeline.stages import Stage
from tasks.preset.sections import Sections, sections_of
from tasks.report.comparison import comparison_page
from tasks.report.drift_page import drift_page
from tasks.report.promotion_page import promotion_page
from tasks.report.rejection_page import rejection_page
from tasks.report.reward_gate_page import reward_gate_page
from tasks.report.reward_page import reward_page
from tasks.report.training_pages import rl_page, sft_page
from tasks.steps.compare import run_compare
from tasks.steps.drift import run_drift
from tasks.steps.episodes import evaluation_corpus, evaluation_sections
from tasks.steps.evaluate import run_evaluate
from tasks.steps.import_sft import import_sections, run_import_sft, source_files
from tasks.steps.online_rl import run_online_rl
from tasks.steps.prepare import (
    demonstrations_source,
    prompts_source,
    run_prepare_demonstrations,
    run_prepare_prompts,
)
from tasks.steps.prepare_preferences import preferences_sections, preferences_source, run_prepare_preferences
from tasks.steps.promote import run_champion, run_promote
from tasks.steps.recipe import unused_by_evaluation, unused_by_pairs, unused_by_rejection, unused_by_rl
from tasks.steps.rejection import needs_reward_model, run_rejection
from tasks.steps.reward_gate import run_reward_gate
from tasks.steps.reward_model import run_reward_model
from tasks.steps.rl_parts import outside, uses_reward_model
from tasks.steps.sft import run_sft
from tasks.tracking.registry import ModelVersion

DATASETS = ("prepare_prompts", "prepare_demonstrations", "prepare_preferences")


def stages(config: RunConfig) -> tuple[Stage, ...]:
    """Every stage of a run; which RL runs there are, and whether they need the reward model, the preset says."""
    return (
        *_base_and_data(),
        _sft("sft", start="import_sft", data="prepare_demonstrations"),
        *(_reward_model() if config.reward_model else ()),
        *(_online_rl(name, config, start="sft") for name in config.runs),
        *_reasoning(config),
        *(_evaluate(name, checkpoint) for name, checkpoint in checkpoints(config).items()),
        _compare(config),
    )


def checkpoints(config: RunConfig) -> dict[str, str]:
    """The checkpoints of a run in the order in which they are made: what each is called, and its stage."""
    optional = [name for name in ("sft_kept", "grpo_mixed") if getattr(config, name) is not None]
    return {"base": "import_sft"} | {name: name for name in ("sft", *config.runs, *optional)}


def promotion_stages(config: RunConfig, champion: ModelVersion | None) -> tuple[Stage, ...]:
    """The stages of a run and, behind them, the promotion of its challenger over the champion of this moment.

    Raises:
        ConfigError: the preset has no section promotion, or its challenger is none of the preset's checkpoints.
    """
    return (*stages(config), *_promotion(config, champion))


def retrain_stages(config: RunConfig, champion: ModelVersion, past: Past) -> tuple[Stage, ...]:
    """New data and reward model against those of the champion's ``past``, RL from the champion, promotion over it."""
    challenger = config.section("promotion", PromotionConfig).challenger
    with_reward_model = uses_reward_model(config.section(challenger, RlConfig))
    datasets = DATASETS if with_reward_model else ("prepare_prompts",)
    drift = Stage(
        name="drift",
        version=1,
        kind="report",
        draw=drift_page,
        run=partial(run_drift, accepted={name: past.datasets[name] for name in datasets if name in past.datasets}),
        inputs=datasets,
        sections=_sections("retrain"),
    )
    prepare_preferences, reward_model = _reward_model() if config.reward_model else (None, None)
    return (
        *_base_and_data(),
        _sft("sft", start="import_sft", data="prepare_demonstrations"),
        *(filter(None, (prepare_preferences, drift, reward_model))),  # drift first: it refuses before the training
        *((_reward_gate(past),) if with_reward_model else ()),
        _online_rl(challenger, config, start="champion"),
        _evaluate(challenger, challenger),
        *_promotion(config, champion),
    )


def _reward_gate(past: Past) -> Stage:
    previous, seen = (past.artifacts.get(name, "") for name in ("reward_model", "prepare_preferences"))
    return Stage(
        name="reward_gate",
        version=1,
        kind="verdict",
        draw=reward_gate_page,
        run=partial(run_reward_gate, previous=previous, seen=seen),
        inputs=("reward_model", "prepare_preferences"),
        sections=_sections("retrain", "preferences", "reward_model", "hardware"),
    )


def _promotion(config: RunConfig, champion: ModelVersion | None) -> tuple[Stage, ...]:
    """The champion, its evaluation, and the verdict."""
    challenger = config.section("promotion", PromotionConfig).challenger
    if challenger not in checkpoints(config):
        raise ConfigError(
            f"promotion.challenger = {challenger!r} is no checkpoint of this preset",
            fix=f"name one of {', '.join(name for name in checkpoints(config) if name != 'base')}",
        )
    inputs: tuple[str, ...] = (challenger, f"evaluate_{challenger}", "prepare_prompts")
    opponent: tuple[Stage, ...] = ()
    if champion is not None:
        uri = f"models:/{champion.name}/{champion.version}"
        imported = Stage(
            name="champion",
            version=1,
            kind="checkpoint",
            run=partial(run_champion, uri=uri, sha256=champion.sha256),
            sections=_sections(),
            external=partial(_constant, champion.model_id),
        )
        opponent, inputs = (imported, _evaluate("champion", "champion")), (*inputs, "champion", "evaluate_champion")
    version, sha256 = (str(champion.version), champion.sha256) if champion else ("", "")
    verdict = Stage(
        name="promote",
        version=1,
        kind="verdict",
        draw=promotion_page,
        run=partial(run_promote, challenger=challenger, champion=version, champion_sha256=sha256),
        inputs=inputs,
        sections=_sections("name", "promotion"),
    )
    return (*opponent, verdict)


def _base_and_data() -> tuple[Stage, ...]:
    return (
        Stage(
            name="import_sft",
            version=1,
            kind="checkpoint",
            model="base",
            run=run_import_sft,
            sections=import_sections,
            external=source_files,
        ),
        Stage(
            name="prepare_prompts",
            version=1,
            kind="dataset",
            run=run_prepare_prompts,
            inputs=("import_sft",),
            sections=_sections("prompts"),
            external=prompts_source,
        ),
        Stage(
            name="prepare_demonstrations",
            version=1,
            kind="dataset",
            run=run_prepare_demonstrations,
            inputs=("import_sft", "prepare_prompts"),
            sections=_sections("demonstrations"),
            external=demonstrations_source,
        ),
    )


def _sft(name: str, *, start: str, data: str) -> Stage:
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        model=name,
        draw=sft_page,
        run=partial(run_sft, section=name, start=start, data=data),
        inputs=(start, data),
        sections=_sections(name, "hardware"),
    )


def _reward_model() -> tuple[Stage, ...]:
    return (
        Stage(
            name="prepare_preferences",
            version=1,
            kind="dataset",
            run=run_prepare_preferences,
            inputs=("sft", "prepare_prompts"),
            sections=preferences_sections,
            external=preferences_source,
            unused=unused_by_pairs,
        ),
        Stage(
            name="reward_model",
            version=1,
            kind="reward_model",
            model="reward-model",
            draw=reward_page,
            run=run_reward_model,
            inputs=("sft", "prepare_preferences"),
            sections=_sections("reward_model", "preferences", "confidence", "hardware"),
        ),
    )


def _reasoning(config: RunConfig) -> tuple[Stage, ...]:
    """The second half of multi-stage reasoning, as far as the preset describes it."""
    found: list[Stage] = []
    if config.rejection is not None:
        found.append(_rejection(config))
    if config.sft_kept is not None:
        start = "import_sft" if config.sft_kept.start == "base" else "grpo"
        found.append(_sft("sft_kept", start=start, data="rejection"))
    if config.grpo_mixed is not None:
        found.append(_online_rl("grpo_mixed", config, start="sft_kept"))
    return tuple(found)


def _rejection(config: RunConfig) -> Stage:
    reward_model = ("reward_model",) if needs_reward_model(config) else ()
    return Stage(
        name="rejection",
        version=1,
        kind="dataset",
        draw=rejection_page,
        run=partial(run_rejection, policy="grpo"),
        inputs=("grpo", "prepare_prompts", *reward_model),
        sections=_sections("rejection", "grpo", "prompts", "hardware"),
        external=partial(outside, section="rejection"),
        unused=unused_by_rejection,
    )


def _compare(config: RunConfig) -> Stage:
    evaluations = (f"evaluate_{name}" for name in checkpoints(config))
    optional = (name for name in ("reward_model", "rejection", "grpo_mixed") if getattr(config, name) is not None)
    return Stage(
        name="compare",
        version=1,
        kind="comparison",
        draw=comparison_page,
        run=run_compare,
        inputs=(*evaluations, *config.runs, *optional),
        sections=_sections("confidence"),
    )


def _online_rl(name: str, config: RunConfig, *, start: str) -> Stage:
    reward_model = ("reward_model",) if uses_reward_model(getattr(config, name)) else ()
    return Stage(
        name=name,
        version=1,
        kind="policy",
        model=name,
        draw=rl_page,
        run=partial(run_online_rl, section=name, start=start),
        inputs=(start, "prepare_prompts", *reward_model),
        sections=_sections(name, "evaluation", "hardware", "health"),
        external=partial(outside, section=name),
        unused=partial(unused_by_rl, section=name),
    )


def _evaluate(name: str, checkpoint: str) -> Stage:
    return Stage(
        name=f"evaluate_{name}",
        version=1,
        kind="evaluation",
        run=partial(run_evaluate, checkpoint=checkpoint),
        inputs=(checkpoint, "prepare_prompts"),
        sections=evaluation_sections,
        external=evaluation_corpus,
        unused=unused_by_evaluation,
    )


def _sections(*names: str) -> Callable[[RunConfig], Sections]:
    """What a stage declares of a preset: ``hardware`` where a model computes."""
    return partial(_pick, names)


def _pick(names: tuple[str, ...], config: RunConfig) -> Sections:
    return sections_of(config, *names)


def _constant(value: str, config: Sections) -> str:
    return value
