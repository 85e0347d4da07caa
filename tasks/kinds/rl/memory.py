"""Memory that an RL stage needs on the device, including its engine."""

from __future__ import annotations

from dataclasses import replace

from rlcore.hardware.memory_plan import ModelSize, rl_footprint
from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.algorithm_facts import uses_critic
from rlcore.tasks.steps.memory_need import OFFLOAD, Device, Need, engine_bytes, of_a_rank, per_pass, true_of


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
    return Need(stage=name, footprint=footprint, engine=engine, fixes=true_of(lowers))
