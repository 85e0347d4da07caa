"""Processes that take one optimizer step together; here alone they talk to each other, by torch.distributed.

Under tensor parallelism neighbouring ranks split every layer's matrices among them. They see the same samples, and are
one of those who share the samples out.

Whatever decides what happens next (is a loss finite, did the policy move far, how many micro-batches) is asked of all
ranks before any of them acts: a rank that went its own way would leave the others waiting for ever.
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
_BUCKET = 1 << 24  # numbers whose gradients are summed in one call


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process has share ``rank`` of ``size``; every method is called by all of them at the same point.

    One alone talks to nobody, so who works with ranks never asks whether there are several. ``width``: how many have
    the same share, each with another part of every layer's matrices; this is number ``part`` of them. ``group``: those
    with the same part of the other shares.
    """

    rank: int = 0
    size: int = 1
    part: int = 0
    width: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes and reports."""
        return self.rank == 0 and self.part == 0

    def any(self, flag: bool) -> bool:
        """Whether it is so on one rank at least."""
        return bool(self.max(int(flag)))

    def max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size * self.width == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, value: T) -> list[T]:
        """The value of each share, in their order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def collect(self, numbers: Sequence[int], values: Sequence[T]) -> list[T]:
        """The values of all ranks by their ``numbers``, which are 0, 1, 2, … of all ranks together."""
        pairs = [pair for part in self.gather(list(zip(numbers, values, strict=True))) for pair in part]
        return [value for _, value in sorted(pairs, key=itemgetter(0))]

    def broadcast_object(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the first rank, on every rank; the others do not do it.

        Raises:
            RlcoreError: what it raised there.
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
        """Give every rank the sum of the gradients; a shard's is that sum already.

        A parameter without a gradient on one rank counts as zero there, and stays without where no rank has one.
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
    """Meet the other ranks at ``store``, a URL as torch.distributed takes it; a call of all waits ``timeout`` seconds.

    Ranks on GPUs talk by NCCL, on CPUs by gloo. ``width`` neighbours have one share together.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        # Every rank makes every group: torch asks for that.
        groups = [dist.new_group(list(range(part, size, width))) for part in range(width)] if width > 1 else [None]
        yield Ranks(rank // width, size // width, part=rank % width, width=width, group=groups[rank % width])
    finally:
        dist.destroy_process_group()


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether this rank holds but a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which each rank may hold a part; all ranks ask at the same point."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type and device in lots of at most ``_BUCKET`` numbers."""
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
