"""Memory that an RL stage needs on the device, including its engine."""

from __future__ import annotations

from dataclasses import replace

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.hardware.memory_plan import ModelSize, rl_footprint
from rlcore.hardware.precision import gains_packed
from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import OFFLOAD, Need, engine_bytes, of_a_rank, per_pass, true_of


def need(name: str, config: RunConfig, size: ModelSize) -> Need:
    """Return the memory of the stage ``name`` for a model of this size."""
    stage, path = config.stage(name, RlStage), f"stages.{name}"
    rl = stage.settings
    device, dtype = choose_device_and_dtype(config.hardware)
    uses_critic = resolve_algorithm(rl).uses_critic
    models = [config.stages[term.stage].settings for term in rl.rewards if term.kind == "reward_model"]
    used = config.engine_of(rl.sampling)
    footprint = rl_footprint(
        size,
        replace(rl, sampling=replace(rl.sampling, engine=used), update=per_pass(rl.update, device)),
        uses_critic=uses_critic,
        reward_model=models[0] if models else None,  # of several models with similar shapes, one is counted
        compute_bytes=dtype.itemsize,
        gradient_checkpointing=config.hardware.gradient_checkpointing,
        num_tokens=max(config.data[each].max_tokens for each in stage.prompts) + rl.sampling.max_new_tokens,
        own_reference=bool(stage.ref_policy),
    )
    if used.kind == "native" and gains_packed(device, dtype):
        footprint = replace(footprint, packed=size.packed_bytes(dtype.itemsize))
    footprint = of_a_rank(footprint, config.distributed, device, is_adapted=rl.update.lora.rank > 0)
    engine = engine_bytes(used, size, device)
    lowers = {
        f"{path}.update.lora.rank = 16": not rl.update.lora.rank,
        f"{path}.update.optim.kind = 'adamw_8bit'": rl.update.optim.kind == "adamw",
        f"{path}.critic.architecture = 'shared'": uses_critic and rl.critic.architecture == "separate",
        f"{path}.kl.coefficient = 0.0": rl.kl.coefficient > 0.0 and not rl.update.lora.rank,
        "engine.gpus.gpu_memory_utilization": engine > 0,
        OFFLOAD: not rl.update.lora.rank and not config.distributed.cpu_offload,
    }
    return Need(stage=name, footprint=footprint, engine=engine, fixes=true_of(lowers))
