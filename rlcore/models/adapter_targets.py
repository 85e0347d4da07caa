"""Linear layers that an adapter can change."""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel

from rlcore.errors import ModelError
from rlcore.hardware.precision import Linear
from rlcore.hardware.sharded import backbone

logger = logging.getLogger(__name__)
# peft treats these names as the projections of all experts of a mixture, which are one tensor in memory.
_OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_READ_DIRECTLY = frozenset(("out_proj", "dt_proj"))  # Mamba kernels read these weights directly
_SMALL_FRACTION = 0.5


def choose_targets(base: PreTrainedModel, wanted: Collection[str]) -> list[str]:
    """Return the last names of the layers to change: ``wanted``, or all that an adapter can change.

    Raises:
        ModelError: The model has no such layer, or none at all.
    """
    known = linear_names(base)
    missing = sorted(set(wanted) - known)
    if not known:
        raise ModelError(
            f"{type(base).__name__} has no linear layer that an adapter can change",
            where="lora.rank",
            fix="train all weights: set lora.rank = 0",
        )
    if missing:
        raise ModelError(
            f"the model has no linear layer {', '.join(missing)} that an adapter can change",
            where="lora.targets",
            fix=f"choose among {', '.join(sorted(known))}",
        )
    return list(wanted) or sorted(known)


def linear_names(base: PreTrainedModel) -> set[str]:
    """Return the last names of the backbone's linear layers that an adapter can change, adapted or not."""
    modules = dict(backbone(base).named_modules())  # type: ignore[attr-defined]  # a module, called as a function
    names = set()
    for path, module in modules.items():
        if (
            isinstance(module, nn.Linear)
            and type(module).forward in (nn.Linear.forward, Linear.forward)
            and ".lora_" not in path
        ):
            names.add(path.removesuffix(".base_layer").rpartition(".")[2])
    if any(_holds_experts(module) for module in modules.values()):
        names -= _OF_EXPERTS
    if any(hasattr(module, "A_log") and hasattr(module, "D") for module in modules.values()):
        names -= _READ_DIRECTLY
    return names


def log_coverage(base: PreTrainedModel, num_changed: int) -> None:
    """Log the changed fraction of the backbone if it is below one half; ``num_changed`` is in weights."""
    embedding = base.get_input_embeddings().weight.numel()
    total = sum(p.numel() for name, p in backbone(base).named_parameters() if ".lora_" not in name)  # type: ignore[attr-defined]
    fraction = num_changed / max(1, total - embedding)
    if fraction < _SMALL_FRACTION:
        experts = " Experts are not changed." if any(map(_holds_experts, base.modules())) else ""
        logger.warning("the adapter changes only %.0f %% of the layers' weights.%s", 100 * fraction, experts)


def _holds_experts(module: nn.Module) -> bool:
    return any(
        p.ndim == 3 and name in ("gate_up_proj", "up_proj", "down_proj")
        for name, p in module.named_parameters(recurse=False)
    )
