"""The table of stage kinds: for each kind its step, its inputs and the page of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

from rlcore.tasks.kinds.benchmark.page import benchmark_page
from rlcore.tasks.kinds.benchmark.step import run_benchmark, task_files
from rlcore.tasks.kinds.difficulty.page import difficulty_page
from rlcore.tasks.kinds.difficulty.step import run_difficulty
from rlcore.tasks.kinds.dpo.page import dpo_page
from rlcore.tasks.kinds.dpo.step import run_dpo
from rlcore.tasks.kinds.rejection.page import rejection_page
from rlcore.tasks.kinds.rejection.step import run_rejection
from rlcore.tasks.kinds.reward_model.page import reward_page
from rlcore.tasks.kinds.reward_model.step import run_reward_model
from rlcore.tasks.kinds.rl.page import rl_page
from rlcore.tasks.kinds.rl.parts import needed_reward_models, outside
from rlcore.tasks.kinds.rl.step import run_online_rl
from rlcore.tasks.kinds.sft.page import sft_page
from rlcore.tasks.kinds.sft.step import run_sft
from rlcore.tasks.kinds.win_rate.page import win_rate_page
from rlcore.tasks.kinds.win_rate.step import run_win_rate
from rlcore.tasks.pipeline.stages import Stage
from rlcore.tasks.presets.graph import evaluated_data, num_earlier_rl, prompt_data, start_of, teacher_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, stage_sections
from rlcore.tasks.presets.stages import (
    BASE,
    BenchmarkStage,
    DifficultyStage,
    DpoStage,
    RejectionStage,
    RewardModelStage,
    RlStage,
    SftStage,
    WinRateStage,
    draw_of,
    reward_models_of,
)
from rlcore.tasks.steps.base import prepared
from rlcore.tasks.steps.recipe import unused_by_stage, unused_by_training

IMPORT = "import_sft"


def stage_of_checkpoint(name: str) -> str:
    """The stage that makes the checkpoint ``name``."""
    return IMPORT if name == BASE else name


def stages_of_data(config: RunConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The stages that make the rows of these names: of data sets, or of stages themselves."""
    return tuple(name if name in config.stages else prepared(name) for name in names)


def sft_stage(name: str, config: RunConfig) -> Stage:
    """A checkpoint trained on demonstrations."""
    own = config.stage(name, SftStage)
    start, data = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, own.data)
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        model=name,
        draw=sft_page,
        run=partial(run_sft, start=start, data=data),
        inputs=(start, *data),
        sections=partial(_sections, name, ("hardware", "placement"), ()),
        unused=unused_by_training,
    )


def dpo_stage(name: str, config: RunConfig) -> Stage:
    """A checkpoint trained on preference pairs."""
    own = config.stage(name, DpoStage)
    start = stage_of_checkpoint(start_of(name, own))
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        model=name,
        draw=dpo_page,
        run=partial(run_dpo, start=start),
        inputs=(start, *stages_of_data(config, own.data)),
        sections=partial(_sections, name, ("confidence", "hardware", "placement"), own.data),
        unused=unused_by_training,
    )


def reward_model_stage(name: str, config: RunConfig) -> Stage:
    """A reward model trained on preference pairs."""
    own = config.stage(name, RewardModelStage)
    start, pairs = stage_of_checkpoint(start_of(name, own)), (*own.data, *own.anchors)
    return Stage(
        name=name,
        version=1,
        kind="reward_model",
        model=name,
        draw=reward_page,
        run=partial(run_reward_model, start=start),
        inputs=(start, *stages_of_data(config, pairs)),
        sections=partial(_sections, name, ("confidence", "hardware", "placement"), pairs),
        unused=unused_by_training,
    )


def rl_stage(name: str, config: RunConfig, *, start: str = "") -> Stage:
    """A policy trained by online RL; ``start`` replaces the preset's own starting stage."""
    own = config.stage(name, RlStage)
    start = start or stage_of_checkpoint(start_of(name, own))
    evaluated, earlier = evaluated_data(config), num_earlier_rl(config, name)
    data = stages_of_data(config, dict.fromkeys((*own.prompts, *evaluated)))
    reference = stage_of_checkpoint(teacher_of(name, own)) or start
    draw = draw_of(own)
    measured = (draw.difficulty,) if draw else ()
    return Stage(
        name=name,
        version=1,
        kind="policy",
        model=name,
        draw=rl_page,
        run=partial(run_online_rl, stage=name, start=start, reference=reference, evaluated=evaluated, earlier=earlier),
        inputs=tuple(dict.fromkeys((start, reference, *data, *measured, *needed_reward_models(own.settings)))),
        sections=partial(_sections, name, ("evaluation", "hardware", "health", "placement"), ()),
        external=outside,
        unused=unused_by_stage,
    )


def rejection_stage(name: str, config: RunConfig) -> Stage:
    """Demonstrations that a policy has written and its rewards have kept."""
    own = config.stage(name, RejectionStage)
    policy, held_out = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, prompt_data(config))
    data = dict.fromkeys((*stages_of_data(config, own.data), *held_out))
    return Stage(
        name=name,
        version=1,
        kind="dataset",
        draw=rejection_page,
        run=partial(run_rejection, policy=policy, held_out=held_out),
        inputs=(policy, *data, *reward_models_of(own)),
        sections=partial(_sections, name, ("confidence", "hardware"), own.data),
        external=outside,
        unused=unused_by_stage,
    )


def difficulty_stage(name: str, config: RunConfig) -> Stage:
    """How often a policy solves each of the prompts."""
    own = config.stage(name, DifficultyStage)
    policy = stage_of_checkpoint(start_of(name, own))
    return Stage(
        name=name,
        version=1,
        kind="difficulty",
        draw=difficulty_page,
        run=partial(run_difficulty, policy=policy),
        inputs=(policy, *stages_of_data(config, own.data), *reward_models_of(own)),
        sections=partial(_sections, name, ("confidence", "hardware"), ()),
        external=outside,
        unused=unused_by_stage,
    )


def win_rate_stage(name: str, config: RunConfig) -> Stage:
    """How often a judge prefers a checkpoint's answers to another's."""
    own = config.stage(name, WinRateStage)
    policy, reference = (stage_of_checkpoint(each) for each in (start_of(name, own), teacher_of(name, own)))
    data = stages_of_data(config, dict.fromkeys((*own.data, *own.human_pairs)))
    return Stage(
        name=name,
        version=1,
        kind="win_rate",
        draw=win_rate_page,
        run=partial(run_win_rate, policy=policy, reference=reference),
        inputs=tuple(dict.fromkeys((policy, reference, *data, *reward_models_of(own)))),
        sections=partial(_sections, name, ("confidence", "hardware"), own.human_pairs),
        external=outside,
        unused=unused_by_stage,
    )


def benchmark_stage(name: str, config: RunConfig) -> Stage:
    """What a checkpoint makes of a benchmark's tasks."""
    own = config.stage(name, BenchmarkStage)
    policy = stage_of_checkpoint(start_of(name, own))
    return Stage(
        name=name,
        version=1,
        kind="benchmark",
        draw=benchmark_page,
        run=partial(run_benchmark, policy=policy),
        inputs=(policy,),
        sections=partial(_sections, name, ("confidence", "hardware"), ()),
        external=task_files,
    )


KINDS: Mapping[str, Callable[[str, RunConfig], Stage]] = MappingProxyType(
    {
        "sft": sft_stage,
        "dpo": dpo_stage,
        "reward_model": reward_model_stage,
        "rl": rl_stage,
        "rejection": rejection_stage,
        "difficulty": difficulty_stage,
        "win_rate": win_rate_stage,
        "benchmark": benchmark_stage,
    }
)


def _sections(name: str, others: tuple[str, ...], data: tuple[str, ...], config: RunConfig) -> Sections:
    return stage_sections(config, name, *others, data=data)
