"""Random entries of parameter tensors: current values, expected values, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlcore.distributed.ranks import is_shard
from rlcore.seeding import generator

_COUNT = 64  # entries per tensor, up to twice that number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbers:
    """Entries of several tensors at regular distances from a random start."""

    parameters: tuple[nn.Parameter, ...]
    slices: tuple[slice, ...]
    counts: tuple[int, ...]

    @classmethod
    def drawn(cls, parameters: Sequence[nn.Parameter], *, seed: int) -> Numbers:
        stream = generator(seed, "numbers of a step")
        draws = torch.rand(len(parameters), generator=stream, dtype=torch.float64).tolist()
        sizes = [local_part(p).numel() for p in parameters]
        slices = []
        for draw, size in zip(draws, sizes, strict=True):
            apart = max(1, size // _COUNT)
            slices.append(slice(int(draw * apart), size, apart))
        counts = [len(range(size)[each]) for size, each in zip(sizes, slices, strict=True)]
        return cls(parameters=tuple(parameters), slices=tuple(slices), counts=tuple(counts))

    def numbers(self, of: Sequence[Tensor] | None = None) -> Tensor:
        """Return the entries as one vector, float64 on the CPU; ``of``: read other tensors of the same shapes."""
        tensors = self.parameters if of is None else of
        entries = [local_part(each).flatten()[index] for each, index in zip(tensors, self.slices, strict=True)]
        return torch.cat(entries).double().cpu()

    def differing(self, numbers: Tensor) -> list[int]:
        """Return the indices of the tensors whose entries differ from ``numbers``."""
        pairs = zip(*(torch.split(each, list(self.counts)) for each in (self.numbers(), numbers)), strict=True)
        return [index for index, (now, then) in enumerate(pairs) if not torch.equal(now, then)]

    def worst(self, found: Tensor, expected: Tensor, start: Tensor) -> tuple[nn.Parameter, float, float, float] | None:
        """Return the tensor with the largest error: its actual and expected change, and the error; or None.

        Rounding explains a sum of a weight and its step that is off by half a unit in the last place.
        """
        wrong = list[tuple[float, nn.Parameter, float, float, float]]()
        columns = [torch.split(each, list(self.counts)) for each in (found, expected, start)]
        for parameter, now, wanted, then in zip(self.parameters, *columns, strict=True):
            distance, size = float((now - wanted).norm()), float((wanted - then).norm())
            bound = 1e-2 * size + 2.5e-7 * float(wanted.norm())
            if not distance <= bound:
                wrong.append((distance / max(bound, 1e-30), parameter, float((now - then).norm()), size, distance))
        return max(wrong, key=lambda row: row[0])[1:] if wrong else None


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor, or this rank's shard of it, detached."""
    found: Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found.detach()
