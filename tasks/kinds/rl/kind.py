"""Stage kind ``rl``: online RL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.checks.health import HealthMonitor
from rlcore.config.rl import OBSERVERS, RlConfig
from rlcore.errors import ConfigError
from rlcore.hardware.memory_plan import ModelSize, rl_footprint
from rlcore.strict_config import INLINE, Fraction, PositiveFloat
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import (
    Continuation,
    History,
    Lazy,
    Stage,
    StageKind,
    own_sections,
    stage_of_checkpoint,
    stage_of_start,
    stages_of_data,
)
from rlcore.tasks.presets.graph import curriculum_of, evaluated_data, num_earlier_rl, ref_policy_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.algorithm_facts import algorithm_facts, uses_critic
from rlcore.tasks.steps.external import external_digest, needed_reward_models
from rlcore.tasks.steps.memory_need import OFFLOAD, Device, Need, engine_bytes, of_a_rank, per_pass, true_of
from rlcore.tasks.store.storage import read_json


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Selection of prompts by measured pass rates. Prompts outside of the limits are not drawn."""

    pass_rates: str  # the stage of kind `difficulty` that has measured them
    min_pass_rate: Fraction = 0.0  # least pass rate that is drawn
    max_pass_rate: Fraction = 1.0  # largest pass rate that is drawn
    # `even`: all equally often; `learnability`: in proportion to p(1 - p), to the resolution of the samples
    weighting: Literal["even", "learnability"] = "even"

    def __post_init__(self) -> None:
        if self.min_pass_rate > self.max_pass_rate:
            raise ConfigError("min_pass_rate must not be above max_pass_rate")


@dataclass(frozen=True, kw_only=True)
class RlStage:
    """Online RL. ``curriculum``: how often each prompt of a dataset is drawn; default: equally often."""

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "prompts"
    is_compared: ClassVar[bool] = True
    kind: Literal["rl"]  # this kind of stage
    init_from: str  # `base`, or the stage whose checkpoint is trained
    prompts: Mapping[str, PositiveFloat]  # datasets of prompts with mixture weights: `{ gsm8k = 0.7, mbpp = 0.3 }`
    ref_policy: str = ""  # checkpoint that KL is measured to; default: `init_from`
    curriculum: DrawConfig | None = None
    settings: RlConfig = field(metadata=INLINE)


def rl_stage(name: str, config: RunConfig, *, start: str = "") -> Stage:
    """Return the stage that trains a policy by online RL; ``start`` replaces the preset's starting stage."""
    own = config.stage(name, RlStage)
    start = start or stage_of_start(name, own)
    data, reference = stages_of_data(config, own.prompts), stage_of_checkpoint(ref_policy_of(name, own)) or start
    draw = curriculum_of(own)
    measured = (draw.pass_rates,) if draw else ()
    inputs = dict.fromkeys((start, reference, *data, *measured, *needed_reward_models(own.settings)))
    graded = dict.fromkeys((*stages_of_data(config, evaluated_data(config)), *config.evaluation.reward_models))
    observed = tuple(name for name in graded if name not in inputs)
    return Stage(
        name=name,
        artifact="policy",
        registered_as=name,
        render_page=Lazy("rlcore.tasks.kinds.rl.page:rl_page"),
        run=partial(
            Lazy("rlcore.tasks.kinds.rl.step:run_online_rl"),
            stage=name,
            start=start,
            reference=reference,
            earlier=num_earlier_rl(config, name),
        ),
        inputs=(*inputs, *observed),
        sections=own_sections(name, "evaluation", "hardware", "health", "distributed"),
        observers=("evaluation", "health", *(f"stage.{key}" for key in OBSERVERS)),
        observed=observed,
        trains_on=data,
        continuation=Continuation(
            length="num_iterations",
            bound=attrgetter("settings.bound_to_length"),
            stop=stop_of,
            recorded=recorded,
        ),
        source_digest=external_digest,
    )


def need(name: str, config: RunConfig, size: ModelSize, device: Device) -> Need:
    """Return the memory of the stage ``name`` for a model of this size."""
    stage, path = config.stage(name, RlStage), f"stages.{name}"
    rl = stage.settings
    has_critic = uses_critic(rl)
    models = [config.stages[term.stage].settings for term in rl.rewards if term.kind == "reward_model"]
    used, asked = config.engine_of(rl.sampling), rl.sampling.agent.max_prompt_tokens if rl.sampling.agent else 0
    footprint = rl_footprint(
        size,
        replace(rl, sampling=replace(rl.sampling, engine=used), update=per_pass(rl.update, device)),
        uses_critic=has_critic,
        reward_model=models[0] if models else None,  # of several models with similar shapes, one is counted
        compute_bytes=device.compute_bytes,
        gradient_checkpointing=config.hardware.gradient_checkpointing,
        num_tokens=max((asked, *(config.data[each].max_tokens for each in stage.prompts))) + rl.sampling.max_new_tokens,
        own_reference=bool(stage.ref_policy),
    )
    if used.kind == "native" and device.gains_packed:
        footprint = replace(footprint, packed=size.packed_bytes(device.compute_bytes))
    footprint = of_a_rank(footprint, config.distributed, device, is_adapted=rl.update.lora.rank > 0)
    engine = engine_bytes(used, size, device)
    lowers = {
        f"{path}.update.lora.rank = 16": not rl.update.lora.rank,
        f"{path}.update.optim.kind = 'adamw_8bit'": rl.update.optim.kind == "adamw",
        f"{path}.critic.architecture = 'shared'": has_critic and rl.critic.architecture == "separate",
        f"{path}.kl.coefficient = 0.0": rl.kl.coefficient > 0.0 and not rl.update.lora.rank,
        "engine.gpus.gpu_memory_utilization": engine > 0,
        OFFLOAD: not rl.update.lora.rank and not config.distributed.cpu_offload,
    }
    sleeps = config.distributed.takes_turns(staleness=rl.sampling.staleness)
    return Need(stage=name, footprint=footprint, engine=engine, sleeps=sleeps, fixes=true_of(lowers))


def errors(key: str, stage: RlStage) -> Iterator[str]:
    """Yield errors of the algorithm and the agent of the stage with the key ``stages.NAME``."""
    facts, agent = algorithm_facts(stage.settings), stage.settings.sampling.agent
    yield from (f"{key}.{error}" for error in facts.errors)
    if agent and agent.branches == "train" and facts.uses_critic:
        yield (
            f"{key}.sampling.agent.branches = 'train': {stage.settings.algorithm} has a critic, whose values of an "
            "episode with several samples are not defined; take 'main', or an algorithm without a critic"
        )


def stop_of(history: History, config: Sections) -> Mapping[str, Any] | None:
    """Return the first stop by the health rules: its rule, its iteration, and the iteration of the result."""
    if config.health.action != "stop":
        return None
    monitor, rows = HealthMonitor(config.health), list[Mapping[str, float]]()
    for row in history:
        rows.append(row)
        report = monitor.update(rows)
        if report.stop:
            return _described(report.stop.rule, int(row["iteration"]), report.last_healthy)
    return None


def recorded(folder: Path) -> tuple[History, Mapping[str, Any] | None]:
    """Return all rows of the history in an artifact, with those after the result, and the stop."""
    history, stopped = read_json(folder / "history.json"), read_json(folder / "health.json")["stopped"]
    if stopped is None:
        return history, None
    stop = _described(stopped["rule"], stopped["iteration"], stopped["result_iteration"])
    return [*history, *stopped["dropped"]], stop


def _described(rule: str, iteration: int, result: int) -> Mapping[str, Any]:
    return {"rule": rule, "iteration": iteration, "result_iteration": result}


KIND = StageKind(stage=rl_stage, memory=need, checks=errors)
