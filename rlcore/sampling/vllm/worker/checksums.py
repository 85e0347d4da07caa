"""Sums over the bits of weights, which say whether two places hold the same numbers, whatever their layout.

An engine fuses, packs and pads, so its tensors are not those of the checkpoint. But it holds the same numbers. The bits
of each element are mixed to 64 pseudo-random bits (those of 0 to 0), and these are added up. Neither the order nor
padding with zeros counts, and one element that differs in its last bit changes the sum. Elements that have swapped
places are not noticed here; the comparison of log-probabilities notices them.

On a CPU vLLM keeps a packed copy of a matrix and drops, or forgets, the original. The copy is read by multiplying it
with unit vectors, which is exact. A seed draws a few columns, the same ones on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

NUM_COLUMNS = 64  # of a packed matrix that are read: enough for 1 changed weight in 1,000 to show in any matrix
_CHUNK = 1 << 18  # elements whose 64 bits are in memory at once
_FIRST, _SECOND = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd: SplitMix64's increment, MurmurHash3's multiplier
_MODULUS = 2**63  # what fits a signed integer on the way
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMBEDDING = "embedding"
_LAYER = re.compile(r"\.(\d+)\.")


def bit_checksum(values: torch.Tensor) -> int:
    """The sum of one tensor, from 0 to 2^63 - 1; -0.0 counts as 0.0, that is as nothing."""
    total = 0
    for chunk in torch.split((values.detach() + 0.0).flatten(), _CHUNK):
        bits = chunk.view(_WORDS[chunk.element_size()]).long()
        bits = bits * _FIRST
        bits ^= bits >> 29
        bits *= _SECOND
        bits ^= bits >> 32
        total += int(bits.sum())
    return total % _MODULUS


def part_of(name: str, num_axes: int = 2) -> str:
    """The part of a model that a weight belongs to. The engine's name and the checkpoint's give the same part.

    Vectors have parts of their own, because several workers share the matrices out while each of them has all norms.
    """
    if num_axes == 1:
        return f"vectors of {part_of(name)}"
    layer = _LAYER.search(name)
    if layer:
        return f"layer {layer[1]}"
    if "lm_head" in name or "embed_out" in name:
        return "head"
    return EMBEDDING if "embed" in name or "wte" in name else "rest"


def columns(count: int, seed: int) -> torch.Tensor:
    """The numbers of the columns that are read, int64: at most ``NUM_COLUMNS`` of ``count``."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:NUM_COLUMNS]


def state_sums(
    weights: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype, seed: int, by_columns: bool
) -> dict[str, int]:
    """The sums of named weights by part, each weight in ``dtype``.

    ``by_columns``: of a matrix, only the columns that ``seed`` draws are summed.
    """
    sums: dict[str, int] = {}
    for name, tensor in weights:
        read = _chosen(tensor.detach(), seed) if by_columns else tensor
        add(sums, part_of(name, tensor.ndim), bit_checksum(read.detach().to(dtype)))
    return sums


def engine_checksums(model: torch.nn.Module, *, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """What a vLLM model holds: ``sums`` by part. ``by_columns``: matrices are packed, so only a few columns are read.

    A packed tied head is read by itself, because it has its own copy. Adapters have parts of their own.
    """
    by_columns = any(hasattr(module, "cpu_linear") for module in model.modules())
    sums: dict[str, int] = {}
    for path, module in model.named_modules():
        # The embedding looks its rows up; a packed copy of it, where vLLM makes one, is not used.
        packed = hasattr(module, "cpu_linear") and part_of(path) != EMBEDDING
        for name, parameter in module.named_parameters(recurse=False):
            if packed and name == "weight":
                add(sums, part_of(f"{path}.weight"), bit_checksum(_multiplied(module, dtype, seed)))
            else:
                read = _chosen(parameter, seed) if by_columns else parameter
                add(sums, part_of(f"{path}.{name}", parameter.ndim), bit_checksum(read.detach().to(dtype)))
        for stacked in (getattr(module, f"lora_{letter}_stacked", ()) for letter in "ab"):
            for tensor in stacked:
                add(sums, adapter_part(path), bit_checksum(tensor.to(dtype)))
    return {"sums": sums, "by_columns": by_columns}


def adapter_part(path: str) -> str:
    """The part of an adapter on the module of that name."""
    return f"adapter of {part_of(f'{path}.weight')}"


def add(sums: dict[str, int], part: str, value: int) -> None:
    """Add ``value`` to the sum of a part."""
    sums[part] = (sums.get(part, 0) + value) % _MODULUS


def _chosen(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return tensor[:, columns(tensor.shape[1], seed).to(tensor.device)] if tensor.ndim == 2 else tensor


def _multiplied(module: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The columns of a packed matrix as it multiplies by them: [columns, outputs]."""
    width = int(module.input_size_per_partition)
    chosen = columns(width, seed)
    units = torch.zeros(len(chosen), width, dtype=dtype)
    units[torch.arange(len(chosen)), chosen] = 1.0
    product: torch.Tensor = module.cpu_linear(units, module.weight, None)
    return product
