"""Ranks that take one optimizer step together, and models whose weights they shard (FSDP2) or replicate.

Only this module calls collectives of torch.distributed. With tensor parallelism, neighbouring ranks split every layer's
matrices. They process the same samples, and count as one rank of the data-parallel group.

Every decision on the next operation (finite loss, early stop, number of micro-batches) is synchronized among all ranks:
one that decided alone would leave the others waiting.

A layer's weights are gathered for its forward pass, and again for its backward pass; those of embeddings, last norm and
heads for the whole pass. So backbone, head and loss must be in one forward pass of one root module. With the library's
model as the root, its head would be called outside of it.

    run_forward(model, work) -> the root's forward: gather; work(); scatter -> the loss, whose backward does likewise

Gradients are sums over the ranks, because the weights of a loss cover the whole optimizer step already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
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

from rlcore.errors import ModelError, RlcoreError

if TYPE_CHECKING:
    from jaxtyping import Real


_BUCKET = 1 << 24  # gradient entries summed in one call


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel rank ``rank`` of ``size``; all ranks call every method together.

    A single process communicates with no other, so callers need no special case.

    Attributes:
        part: Tensor-parallel rank.
        width: Number of tensor-parallel ranks.
        group: Process group of the data-parallel ranks with the same ``part``, or None for all.
    """

    rank: int = 0
    size: int = 1
    part: int = 0
    width: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """True if this rank writes and reports."""
        return self.rank == 0 and self.part == 0

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on at least one rank."""
        return bool(self.max(int(flag)))

    def max(self, number: int) -> int:
        """Return the maximum over the ranks."""
        if self.size * self.width == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, value: T) -> list[T]:
        """Return the value of each data-parallel rank, in order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def collect(self, numbers: Sequence[int], values: Sequence[T]) -> list[T]:
        """Return the values of all ranks in the order of their ``numbers``, which are 0, 1, 2, … over all ranks."""
        pairs = [pair for part in self.gather(list(zip(numbers, values, strict=True))) for pair in part]
        return [value for _, value in sorted(pairs, key=itemgetter(0))]

    def broadcast_object(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank only, and return its result on every rank.

        Raises:
            RlcoreError: Raised by ``work``.
        """
        if self.size * self.width == 1:
            return work()
        found: T | RlcoreError | None = None
        if self.is_first:
            try:
                found = work()
            except RlcoreError as error:
                found = error
        sent = [found]
        dist.broadcast_object_list(sent, src=0)
        if isinstance(sent[0], RlcoreError):
            raise sent[0]
        return sent[0]  # type: ignore[return-value]

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks, except those of shards, which are sums already.

        A parameter without a gradient on one rank counts as zero there; without one on all ranks it stays without.
        """
        if self.size == 1:
            return
        whole = [parameter for parameter in parameters if not is_shard(parameter)]
        has_one = [any(flags) for flags in zip(*self.gather([p.grad is not None for p in whole]), strict=True)]
        learning = [parameter for parameter, has in zip(whole, has_one, strict=True) if has]
        for bucket in _buckets(learning):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)


ONE = Ranks()


@contextmanager
def open_ranks(
    rank: int, size: int, *, store: str, device: torch.device, timeout: float, width: int = 1
) -> Iterator[Ranks]:
    """Connect to the other ranks at ``store``, a torch.distributed URL. Collectives time out after ``timeout`` seconds.

    GPUs use NCCL, CPUs gloo. ``width`` neighbours form one data-parallel rank.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        # torch requires that every rank creates every group.
        groups = [dist.new_group(list(range(part, size, width))) for part in range(width)] if width > 1 else [None]
        yield Ranks(rank // width, size // width, part=rank % width, width=width, group=groups[rank % width])
    finally:
        dist.destroy_process_group()


def is_shard(tensor: Real[torch.Tensor, "..."]) -> bool:
    """Return True if this rank holds only a shard of the tensor."""
    return hasattr(tensor, "full_tensor")


def gather_full(tensor: Real[torch.Tensor, "..."]) -> Real[torch.Tensor, "..."]:
    """Return the full tensor, gathered from its shards; all ranks call it together."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        fits = bucket and parameter.dtype == bucket[0].dtype and parameter.device == bucket[0].device
        if bucket and (not fits or size + parameter.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


T = TypeVar("T")
_MARK = "_membership"
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A matrix whose output, or input, is full on each rank, because it is split elsewhere or normalized as a whole.
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    # A norm within heads: each rank has some heads, and the gradient of the weight is the sum over all heads.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """Sharding of weights. ``dtype``: precision of gathered weights and of gradients; None: that of the weights.

    Gradients are summed in float32. ``offload``: shards, gradients and moments are in CPU memory, where the optimizer
    steps; the device holds one layer.
    """

    dtype: torch.dtype | None = None
    offload: bool = False


@dataclass(frozen=True, slots=True)
class _Membership:
    ranks: Ranks
    root: nn.Module | None = None
    device: torch.device | None = None


class _ForwardModule(nn.Module):
    """A model, or a critic with the policy's backbone, with a configurable forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """Return ``work()``, with all weights outside of layers gathered."""
        return work()


def attach_ranks(model: nn.Module, ranks: Ranks) -> None:
    """Register the ranks that hold a full copy of the model and share its passes."""
    setattr(_language_model(model), _MARK, _Membership(ranks))


def shard(model: nn.Module, ranks: Ranks, sharding: ShardConfig, *, device: torch.device) -> None:
    """Replace the weights of a language model, or of a critic with its backbone, by this rank's shards.

    Every rank must hold the same weights. Create the optimizer afterwards.

    Raises:
        ModelError: Tensor parallelism is enabled, and the model has no plan for it.
    """
    language_model = _language_model(model)
    mesh = init_device_mesh(device.type, (ranks.size, ranks.width), mesh_dim_names=("data", "tensor"))
    if ranks.width > 1:
        _split(language_model, mesh["tensor"])
    settings: dict[str, Any] = {
        "mesh": mesh["data"],
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
    """Return the compute device of a model; its shards may be elsewhere."""
    device: torch.device = _membership(model).device or _language_model(model).device
    return device


def _split(model: Any, mesh: DeviceMesh) -> None:
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
        reason = "transformers has no plan for it"
    elif unknown:
        reason = f"its plan has {', '.join(unknown)}"
    elif any(count % width for count in heads):
        reason = f"it has {heads[0]} heads and {heads[1]} KV heads"
    if reason:
        raise ModelError(
            f"{type(model).__name__} cannot be split among {width} ranks: {reason}",
            where="distributed.tensor_parallel",
            fix="set it to 1: FSDP shards are as small, and are gathered layer by layer",
        )
    for layer in _layers(model):
        parallelize_module(layer, mesh, {name: _STYLES[style]() for name, style in plan.items()})


def ranks_of(model: Any) -> Ranks:
    """Return the ranks that share the passes of a model."""
    return _membership(model).ranks


def is_single_process(model: Any) -> bool:
    """Return True if this process has the full model and shares no pass with another."""
    membership = _membership(model)
    return membership.ranks.size == 1 and membership.root is None


def run_forward(model: Any, work: Callable[[], T]) -> T:
    """Return ``work()``: one forward pass of ``model`` and everything computed from it, up to the loss."""
    root = _membership(model).root
    return work() if root is None else root(work)


def shard_like(parameter: Real[torch.Tensor, "..."], tensor: Real[torch.Tensor, "..."]) -> Real[torch.Tensor, "..."]:
    """Shard ``tensor``, which is full on every rank, like ``parameter``; return it unchanged if that is full."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    part = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)  # with CPU offload shards are not on the mesh's device


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """Gather the state of a sharded model in the first rank's memory; tied weights stay one tensor.

    Returns None for a model that is not sharded. All ranks call it together; the others get an empty mapping.
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
    names = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]


def _membership(model: Any) -> _Membership:
    return getattr(_language_model(model), _MARK, _Membership(ONE))


def _language_model(model: Any) -> Any:
    backbone_of_head = getattr(model, "backbone", model)
    return getattr(backbone_of_head, "base", backbone_of_head)


def _layers(model: Any) -> list[nn.Module]:
    """Return the blocks of a backbone: its largest module list, because a block's experts may be a list too."""
    modules: Any = backbone(model)
    lists = [module for module in modules.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_size) if lists else nn.ModuleList()
    return list(largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def backbone(model: Any) -> Callable[..., Any]:
    """Return the model without its head: ``base_model``, unless that is the model itself and it has a ``model``."""
    base = model.base_model
    part: Callable[..., Any] = getattr(model, "model", base) if base is model else base
    return part
