"""Memory that an SFT stage needs on the device."""

from __future__ import annotations

from rlcore.hardware.memory_plan import ModelSize, sft_footprint
from rlcore.tasks.kinds.sft.settings import SftStage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import Device, Need, per_pass, supervised_need


def need(name: str, config: RunConfig, size: ModelSize, device: Device) -> Need:
    """Return the memory of the stage ``name`` for a model of this size."""
    own = per_pass(config.stage(name, SftStage).settings, device)
    found = sft_footprint(
        size, own, compute_bytes=device.compute_bytes, gradient_checkpointing=config.hardware.gradient_checkpointing
    )
    return supervised_need(name, config, device, found)
