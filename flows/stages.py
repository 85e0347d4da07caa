"""The stages of a run and what each depends on, from the graph of its preset. Flows name targets; the order follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlcore.flows.kinds import IMPORT, KINDS, rl_stage, stage_of_checkpoint, stages_of_data
from rlcore.tasks.kinds.base.step import import_sections, registered_version, run_import_sft, run_start, source_files
from rlcore.tasks.kinds.compare.page import comparison_page
from rlcore.tasks.kinds.compare.step import run_compare
from rlcore.tasks.kinds.data.page import data_page
from rlcore.tasks.kinds.data.sampled_step import run_prepare_sampled
from rlcore.tasks.kinds.data.step import data_source, run_prepare
from rlcore.tasks.kinds.drift.page import drift_page
from rlcore.tasks.kinds.drift.step import run_drift
from rlcore.tasks.kinds.evaluate.step import run_evaluate
from rlcore.tasks.kinds.promote.page import promotion_page
from rlcore.tasks.kinds.promote.step import (
    CHALLENGER_ASKED,
    CHAMPION_ASKED,
    CHAMPION_STAGE,
    WINS,
    run_champion,
    run_promote,
)
from rlcore.tasks.kinds.reward_gate.page import reward_gate_page
from rlcore.tasks.kinds.reward_gate.step import run_reward_gate
from rlcore.tasks.kinds.rl.parts import needed_reward_models
from rlcore.tasks.pipeline.stages import Stage
from rlcore.tasks.presets.data import POLICY, DatasetConfig
from rlcore.tasks.presets.graph import (
    checkpoints,
    contrasts,
    evaluated_data,
    math_data,
    opponents,
    prompt_data,
    registered_starts,
    stage_order,
)
from rlcore.tasks.presets.promotion import PromotionConfig
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, data_sections, sections_of, stage_sections
from rlcore.tasks.presets.stages import BenchmarkStage, RlStage, WinRateStage, data_of
from rlcore.tasks.steps.base import prepared
from rlcore.tasks.steps.data import resolve_adapter
from rlcore.tasks.steps.episodes import evaluation_episodes, evaluation_sections
from rlcore.tasks.steps.recipe import unused_by_evaluation, unused_by_import, unused_by_pairs, unused_by_preparing
from rlcore.tasks.tracking.past import Past
from rlcore.tasks.tracking.registry import ModelVersion


def stages(config: RunConfig) -> tuple[Stage, ...]:
    """Every stage of a run: imports, data, the preset's own, an evaluation of each checkpoint, the comparison."""
    return (
        *_imports_and_data(config),
        *(KINDS[config.stages[name].kind](name, config) for name in stage_order(config)),
        *(_evaluate(name, config) for name in checkpoints(config)),
        _compare(config),
    )


def datasets(config: RunConfig) -> tuple[str, ...]:
    """The stages that prepare the data sets."""
    return tuple(prepared(name) for name in config.data)


def promotion_stages(config: RunConfig, champion: ModelVersion | None) -> tuple[Stage, ...]:
    """The stages of a run, followed by the promotion of its challenger over the present champion.

    Raises:
        ConfigError: the preset has no section promotion.
    """
    return (*stages(config), *_promotion(config, champion))


def retrain_stages(config: RunConfig, champion: ModelVersion, past: Past) -> tuple[Stage, ...]:
    """The stages of a retraining: gates for drift and reward model, RL from the champion, promotion over it."""
    challenger = config.section("promotion", PromotionConfig).challenger
    own = config.stage(challenger, RlStage)
    models = needed_reward_models(own.settings)
    rows = dict.fromkeys((*own.prompts, *(name for model in models for name in data_of(config.stages[model]))))
    data = stages_of_data(config, rows)
    drift = Stage(
        name="drift",
        version=1,
        kind="report",
        draw=drift_page,
        run=partial(run_drift, accepted={name: past.datasets[name] for name in data if name in past.datasets}),
        inputs=data,
        sections=_sections("retrain"),
    )
    return (
        *_imports_and_data(config),
        drift,  # before what is trained: it refuses before the training
        *(KINDS[config.stages[name].kind](name, config) for name in stage_order(config) if name != challenger),
        *(_reward_gate(name, config, past) for name in models),
        rl_stage(challenger, config, start="champion"),
        _evaluate(challenger, config),
        *_promotion(config, champion),
    )


def _reward_gate(model: str, config: RunConfig, past: Past) -> Stage:
    names = data_of(config.stages[model])
    data = stages_of_data(config, names)
    return Stage(
        name="reward_gate",
        version=1,
        kind="verdict",
        draw=reward_gate_page,
        run=partial(
            run_reward_gate,
            model=model,
            registered=f"{config.name}-{model}",
            previous=past.artifacts.get(model, ""),
            seen=past.paired,
        ),
        inputs=(model, *data),
        sections=partial(_gate_sections, model, names),
    )


def _promotion(config: RunConfig, champion: ModelVersion | None) -> tuple[Stage, ...]:
    """The champion, what it is compared by, and the verdict."""
    promotion = config.section("promotion", PromotionConfig)
    challenger, data = promotion.challenger, evaluated_data(config)
    judged = config.stage(promotion.win_rate, WinRateStage).data if promotion.win_rate else ()
    asked = dict.fromkeys((*data, *judged))
    asks = tuple(_benchmark(name, challenger, CHALLENGER_ASKED, config) for name in promotion.benchmarks if champion)
    inputs: tuple[str, ...] = (challenger, f"evaluate_{challenger}", *stages_of_data(config, asked))
    opponent: tuple[Stage, ...] = ()
    if champion is not None:
        uri = f"models:/{champion.name}/{champion.version}"
        imported = Stage(
            name=CHAMPION_STAGE,
            version=1,
            kind="checkpoint",
            run=partial(run_champion, uri=uri, sha256=champion.sha256),
            sections=_sections(),
            external=partial(_constant, champion.model_id),
        )
        wins = (_champion_win_rate(config),) if promotion.win_rate else ()
        theirs = (_benchmark(name, CHAMPION_STAGE, CHAMPION_ASKED, config) for name in promotion.benchmarks)
        opponent = (imported, _evaluate(CHAMPION_STAGE, config), *wins, *asks, *theirs)
        inputs = (*inputs, *(stage.name for stage in opponent))
    version, sha256 = (str(champion.version), champion.sha256) if champion else ("", "")
    verdict = Stage(
        name="promote",
        version=1,
        kind="verdict",
        draw=promotion_page,
        run=partial(
            run_promote, challenger=challenger, champion=version, champion_sha256=sha256, data=data, judged=judged
        ),
        inputs=inputs,
        sections=_sections("name", "promotion"),
    )
    return (*opponent, verdict)


def _champion_win_rate(config: RunConfig) -> Stage:
    """The win rate of the challenger over the champion, by the judge of the stage that the promotion names."""
    promotion = config.section("promotion", PromotionConfig)
    name, own = promotion.win_rate, config.stage(promotion.win_rate, WinRateStage)
    compared = replace(own, start=promotion.challenger, reference=CHAMPION_STAGE)
    between = replace(config, stages={**config.stages, name: compared})
    stage = KINDS["win_rate"](name, between)
    return replace(stage, name=WINS, sections=partial(_as_in, between, stage.sections))


def _benchmark(name: str, checkpoint: str, beginning: str, config: RunConfig) -> Stage:
    """The tasks of the stage ``name``, asked another checkpoint."""
    asked = replace(config.stage(name, BenchmarkStage), start=checkpoint)
    between = replace(config, stages={**config.stages, name: asked})
    stage = KINDS["benchmark"](name, between)
    return replace(stage, name=f"{beginning}{name}", sections=partial(_as_in, between, stage.sections))


def _as_in(changed: RunConfig, sections: Callable[[RunConfig], Sections], config: RunConfig) -> Sections:
    """The sections of a stage of another preset, ``changed``."""
    return sections(changed)


def _imports_and_data(config: RunConfig) -> tuple[Stage, ...]:
    base = Stage(
        name=IMPORT,
        version=1,
        kind="checkpoint",
        model="base",
        run=run_import_sft,
        sections=import_sections,
        external=source_files,
        unused=unused_by_import,
    )
    starts = (_start(name, model) for name, model in registered_starts(config).items())
    return (base, *starts, *(_prepare(name, config) for name in config.data))


def _start(name: str, model: str) -> Stage:
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        run=partial(run_start, model=model),
        inputs=(IMPORT,),
        sections=_sections(),
        external=partial(registered_version, model=model),
    )


def _prepare(name: str, config: RunConfig) -> Stage:
    """The stage that prepares a data set. It refuses or drops prompts that other data sets hold out for evaluation."""
    data, asked = config.data[name], prompt_data(config)
    held_out = stages_of_data(config, asked[: asked.index(name)] if data.has_prompts else asked)
    if resolve_adapter(data) == POLICY:
        return _prepare_sampled(name, data, asked, held_out)
    is_graded = name in math_data(config)
    return Stage(
        name=prepared(name),
        version=1,
        kind="dataset",
        draw=data_page,
        run=partial(run_prepare, name=name, held_out=held_out, is_graded=is_graded),
        inputs=(IMPORT, *held_out),
        sections=partial(_data_sections, name, ()),
        external=data_source,
        unused=partial(unused_by_preparing, is_graded=is_graded),
    )


def _prepare_sampled(name: str, data: DatasetConfig, asked: tuple[str, ...], held_out: tuple[str, ...]) -> Stage:
    policy = stage_of_checkpoint(data.policy)
    return Stage(
        name=prepared(name),
        version=1,
        kind="dataset",
        draw=data_page,
        run=partial(run_prepare_sampled, name=name, policy=policy, prompts=asked, held_out=held_out),
        inputs=(policy, *held_out),
        sections=partial(_data_sections, name, ("evaluation", "engine", "hardware")),
        external=data_source,
        unused=unused_by_pairs,
    )


def _compare(config: RunConfig) -> Stage:
    evaluations = (f"evaluate_{name}" for name in checkpoints(config))
    told = (name for name in stage_order(config) if config.stages[name].is_compared)
    return Stage(
        name="compare",
        version=1,
        kind="comparison",
        draw=comparison_page,
        run=partial(run_compare, contrasts=contrasts(config), opponents=opponents(config)),
        inputs=(*evaluations, *told),
        sections=_sections("confidence"),
    )


def _evaluate(checkpoint: str, config: RunConfig) -> Stage:
    data, stage = evaluated_data(config), stage_of_checkpoint(checkpoint)
    return Stage(
        name=f"evaluate_{checkpoint}",
        version=1,
        kind="evaluation",
        run=partial(run_evaluate, checkpoint=stage, data=data),
        inputs=(stage, *stages_of_data(config, data)),
        sections=evaluation_sections,
        external=evaluation_episodes,
        unused=unused_by_evaluation,
    )


def _sections(*names: str) -> Callable[[RunConfig], Sections]:
    """What a stage declares of a preset: ``hardware`` where a model computes."""
    return partial(_pick, names)


def _pick(names: tuple[str, ...], config: RunConfig) -> Sections:
    return sections_of(config, *names)


def _data_sections(name: str, others: tuple[str, ...], config: RunConfig) -> Sections:
    return data_sections(config, name, *others)


def _gate_sections(model: str, data: tuple[str, ...], config: RunConfig) -> Sections:
    return stage_sections(config, model, "retrain", "hardware", data=data)


def _constant(value: str, config: Sections) -> str:
    return value
