"""Checksums of weights, which compare models across memory layouts.

An engine fuses, packs and pads a checkpoint's numbers. The bits of each are mixed to 64 pseudo-random bits (zero stays
zero), which are summed: order and zero padding do not matter, one changed bit does. Exchanged elements are detected by
the comparison of log-probabilities instead.

On a CPU vLLM keeps a packed copy of a matrix and drops the original. The copy is read by multiplying it with unit
vectors, which is exact. A seed draws a few columns, the same on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

NUM_COLUMNS = 64  # columns read of a packed matrix: enough to detect 1 changed weight in 1,000
_CHUNK = 1 << 18  # elements mixed at a time
_FIRST, _SECOND = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd: SplitMix64's increment, MurmurHash3's multiplier
_MODULUS = 2**63  # fits a signed integer
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMBEDDING = "embedding"
_LAYER = re.compile(r"\.(\d+)\.")


def bit_checksum(values: torch.Tensor) -> int:
    """Return the checksum of a tensor, 0 to 2^63 - 1. -0.0 counts as 0.0."""
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
    """Return the part of a model that a weight belongs to, equal for the engine's and the checkpoint's name.

    Vectors have separate parts, because workers split the matrices while each has all norms.
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
    """Return the indices of the columns to read, int64: at most ``NUM_COLUMNS`` of ``count``."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:NUM_COLUMNS]


def state_checksums(
    weights: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype, seed: int, by_columns: bool
) -> dict[str, int]:
    """Return the checksums of named weights by part, each weight converted to ``dtype``.

    ``by_columns``: sum only the columns of a matrix that ``seed`` draws.
    """
    sums: dict[str, int] = {}
    for name, tensor in weights:
        read = _chosen(tensor.detach(), seed) if by_columns else tensor
        add(sums, part_of(name, tensor.ndim), bit_checksum(read.detach().to(dtype)))
    return sums


def engine_checksums(model: torch.nn.Module, *, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Return the checksums of a vLLM model by part. ``by_columns`` is True if matrices are packed.

    A packed tied head is a copy, and read separately.
    """
    by_columns = any(hasattr(module, "cpu_linear") for module in model.modules())
    sums: dict[str, int] = {}
    for path, module in model.named_modules():
        # The embedding reads rows of the original; a packed copy is not used.
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
    """Return the part of an adapter on the module of that name."""
    return f"adapter of {part_of(f'{path}.weight')}"


def add(sums: dict[str, int], part: str, value: int) -> None:
    """Add ``value`` to the checksum of a part."""
    sums[part] = (sums.get(part, 0) + value) % _MODULUS


def _chosen(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return tensor[:, columns(tensor.shape[1], seed).to(tensor.device)] if tensor.ndim == 2 else tensor


def _multiplied(module: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return columns of a packed matrix by multiplication: [columns, outputs]."""
    width = int(module.input_size_per_partition)
    chosen = columns(width, seed)
    units = torch.zeros(len(chosen), width, dtype=dtype)
    units[torch.arange(len(chosen)), chosen] = 1.0
    product: torch.Tensor = module.cpu_linear(units, module.weight, None)
    return product
