"""Ranks: processes that take one optimizer step together. Only this module calls collectives of torch.distributed.

With tensor parallelism, neighbouring ranks split every layer's matrices. They process the same samples, and count as
one rank of the data-parallel group.

Every decision on the next operation (finite loss, early stop, number of micro-batches) is synchronized among all ranks.
A rank that decided alone would leave the others waiting forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rlcore.errors import RlcoreError

T = TypeVar("T")
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


def is_shard(tensor: torch.Tensor) -> bool:
    """Return True if this rank holds only a shard of the tensor."""
    return hasattr(tensor, "full_tensor")


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, gathered from its shards; all ranks call it together."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype and device, at most ``_BUCKET`` entries together."""
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
