"""Which linear layers an adapter can change, and how much of a model that is."""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel

from rlcore.errors import ModelError
from rlcore.models.architectures import backbone

logger = logging.getLogger(__name__)
# peft takes these names for the projections of all of a mixture's experts, which are one tensor in memory.
_OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_READ_DIRECTLY = frozenset(("out_proj", "dt_proj"))  # a Mamba layer's kernels take these weights without the module
_SMALL_SHARE = 0.5


def choose_targets(base: PreTrainedModel, wanted: Collection[str]) -> list[str]:
    """The last names of the layers that an adapter changes: those wanted, or all that it can.

    Raises:
        ModelError: the model has no such layer, or none at all.
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
    """Last names of the backbone's linear layers that an adapter can change, with or without one on them."""
    modules = dict(backbone(base).named_modules())  # type: ignore[attr-defined]  # a module, called as a function
    names = set()
    for path, module in modules.items():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and ".lora_" not in path:
            names.add(path.removesuffix(".base_layer").rpartition(".")[2])
    if any(_holds_experts(module) for module in modules.values()):
        names -= _OF_EXPERTS
    if any(hasattr(module, "A_log") and hasattr(module, "D") for module in modules.values()):
        names -= _READ_DIRECTLY
    return names


def log_coverage(base: PreTrainedModel, num_changed: int) -> None:
    """Log how much of the backbone an adapter changes, ``num_changed`` weights, where that is the smaller part."""
    embedding = base.get_input_embeddings().weight.numel()
    total = sum(p.numel() for name, p in backbone(base).named_parameters() if ".lora_" not in name)  # type: ignore[attr-defined]
    share = num_changed / max(1, total - embedding)
    if share < _SMALL_SHARE:
        experts = " Its experts keep theirs." if any(map(_holds_experts, base.modules())) else ""
        logger.warning("the adapter changes %.0f %% of the weights of the layers.%s", 100 * share, experts)


def _holds_experts(module: nn.Module) -> bool:
    return any(
        p.ndim == 3 and name in ("gate_up_proj", "up_proj", "down_proj")
        for name, p in module.named_parameters(recurse=False)
    )
