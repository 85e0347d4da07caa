"""Models whose weights lie in shards on several ranks (FSDP2), or whole on each: the same forward passes either way.

A layer's weights are gathered for its forward pass, and again for its backward pass; those of embeddings, last norm and
heads for the whole pass. So trunk, head and loss have to stand in one forward pass of one root module: with the
library's model as the root, its head would be asked for outside of it.

    run_forward(model, work) -> the root's forward: gather; work(); scatter -> the loss, whose backward does likewise

Gradients arrive as sums over the ranks, since a loss's weights are those of the whole optimizer step already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlcore.distributed.ranks import ONE, Ranks, gather_full
from rlcore.errors import ModelError
from rlcore.models.architectures import backbone

if TYPE_CHECKING:
    from jaxtyping import Real

T = TypeVar("T")
_MARK = "_membership"
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A matrix whose output, or input, is whole on each rank, since it is cut elsewhere or normed as a whole.
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    # A norm within heads: each rank has some heads, and the gradient of the weight is the sum over all of them.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """How weights are cut up. ``dtype``: in which precision they are gathered, and gradients computed; None: their own.

    Gradients are summed in float32. ``offload``: shards, gradients and moments rest in the machine's memory, where the
    optimizer's step is computed; the device holds what a layer needs.
    """

    dtype: torch.dtype | None = None
    offload: bool = False


@dataclass(frozen=True, slots=True)
class _Membership:
    """Of which ranks a model's copies or shards are; where it is in shards, the root, and the device that computes."""

    ranks: Ranks
    root: nn.Module | None = None
    device: torch.device | None = None


class _ForwardModule(nn.Module):
    """A model, or a critic with the policy below it, as one module that computes whatever it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, while the weights that no layer holds are there as a whole."""
        return work()


def attach_ranks(model: nn.Module, ranks: Ranks) -> None:
    """Say that every one of ``ranks`` has this model, whole: passes over sequences are shared among them."""
    setattr(_language_model(model), _MARK, _Membership(ranks))


def shard(model: nn.Module, ranks: Ranks, sharding: ShardConfig, *, device: torch.device) -> None:
    """Leave of a model's weights this rank's shards. ``model``: a language model, or a critic with its trunk.

    Every rank holds the same weights before it. An optimizer is made after it.

    Raises:
        ModelError: the ranks are to split its layers' matrices among them, and the model has no plan for that.
    """
    language_model = _language_model(model)
    mesh = init_device_mesh(device.type, (ranks.size, ranks.width), mesh_dim_names=("shares", "parts"))
    if ranks.width > 1:
        _split(language_model, mesh["parts"])
    settings: dict[str, Any] = {
        "mesh": mesh["shares"],
        "reshard_after_forward": True,  # of the root too: weights that stay gathered would be stale after a step
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.dtype,
            reduce_dtype=torch.float32 if sharding.dtype else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if sharding.offload else OffloadPolicy(),
    }
    root = _ForwardModule(model)
    for module in (*_layers(language_model), root):
        fully_shard(module, **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    setattr(language_model, _MARK, _Membership(ranks, root, device))


def device_of(model: Any) -> torch.device:
    """Where a model computes, which may have an adapter or a scalar head on; its shards may rest elsewhere."""
    device: torch.device = _membership(model).device or _language_model(model).device
    return device


def _split(model: Any, mesh: DeviceMesh) -> None:
    """Leave of each layer's matrices this rank's columns or rows, as the library's plan for the model says."""
    config, width = model.config, mesh.size()
    plan = {
        name.removeprefix("layers.*."): style
        for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
        if name.startswith("layers.*.")
    }
    unknown = sorted({*plan.values()} - _STYLES.keys())
    heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)]
    reason = ""
    if not plan:
        reason = "the library has no plan for it"
    elif unknown:
        reason = f"its plan has {', '.join(unknown)}"
    elif any(count % width for count in heads):
        reason = f"it has {heads[0]} heads and {heads[1]} of keys"
    if reason:
        raise ModelError(
            f"{type(model).__name__} cannot be split among {width} ranks: {reason}",
            where="distributed.tensor_parallel",
            fix="set it to 1: shards of all weights are as small, and gathered layer by layer",
        )
    for layer in _layers(model):
        parallelize_module(layer, mesh, {name: _STYLES[style]() for name, style in plan.items()})


def ranks_of(model: Any) -> Ranks:
    """The ranks that share the passes of a model, which may have an adapter or a scalar head on."""
    return _membership(model).ranks


def is_single_process(model: Any) -> bool:
    """Whether this process has the model as a whole, and shares no pass with another."""
    membership = _membership(model)
    return membership.ranks.size == 1 and membership.root is None


def run_forward(model: Any, work: Callable[[], T]) -> T:
    """What ``work`` gives: one forward pass of ``model`` and all that is computed of it up to the loss."""
    root = _membership(model).root
    return work() if root is None else root(work)


def shard_like(parameter: Real[torch.Tensor, "..."], tensor: Real[torch.Tensor, "..."]) -> Real[torch.Tensor, "..."]:
    """``tensor``, whole on every rank, cut up as ``parameter`` is; unchanged where that is whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    part = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)  # the mesh's device computes, and shards may rest elsewhere


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """The state of a model in shards, whole, in the first rank's memory; tied weights are one tensor, as in the model.

    None for a model that this process has as a whole. All ranks ask at the same point; the others get an empty one.
    """
    membership = _membership(model)
    if membership.root is None:
        return None
    found: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *_kept_buffers(model)):
        if id(tensor) not in known:
            gathered = gather_full(tensor.detach())
            known[id(tensor)] = gathered.cpu() if membership.ranks.is_first else gathered.new_empty(0)
        if membership.ranks.is_first:
            found[name] = known[id(tensor)]
    return found


def _kept_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint of the model has."""
    names = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]


def _membership(model: Any) -> _Membership:
    return getattr(_language_model(model), _MARK, _Membership(ONE))


def _language_model(model: Any) -> Any:
    """What lies below a scalar head and an adapter."""
    trunk_of_head = getattr(model, "backbone", model)
    return getattr(trunk_of_head, "base", trunk_of_head)


def _layers(model: Any) -> list[nn.Module]:
    """The blocks of a trunk: of its lists of modules (a block's experts may be one), that which holds the most."""
    modules: Any = backbone(model)
    lists = [module for module in modules.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_size) if lists else nn.ModuleList()
    return list(largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
