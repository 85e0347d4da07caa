"""Weights as a file that another process reads: checked against the checkpoint that the engine was started from."""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from transformers import AutoConfig

from rlcore.models import architectures

_MEMORY = Path("/dev/shm")  # a file there never touches a disk
_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint folder stores; of tied ones, one name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
    return shapes


def misfits(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Why ``state`` is not the whole of such a checkpoint; a further name of a stored tensor has to hold the same."""
    missing = [f"{name} is missing" for name in shapes if name not in state]
    other = [
        f"{name} has another shape" for name in shapes if name in state and tuple(state[name].shape) != shapes[name]
    ]
    extra = [
        f"{name} is unknown, or tied in the engine and different here"
        for name in state
        if name not in shapes and not any(_is_same(state[name], state[twin]) for twin in shapes if twin in state)
    ]
    return sorted(missing + other + extra)


def adapter_misfits(shapes: Mapping[str, tuple[int, ...]], adapter: Mapping[str, tuple[int, int]]) -> list[str]:
    """Why an adapter is not one of such a checkpoint; ``adapter``: shapes of the weights that it changes."""
    return [
        f"{name} has no weight of the adapter's shape" for name in sorted(adapter) if shapes.get(name) != adapter[name]
    ]


class Converted(Mapping[str, torch.Tensor]):
    """The tensors of ``state`` that ``shapes`` names, in ``dtype``, contiguous, on their device; made when read and not
    kept."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], *, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._state, self.shapes, self.dtype = state, shapes, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[name].detach().to(self.dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def write_weights(weights: Converted, path: Path) -> None:
    """Save them in the safetensors format, one tensor in this machine's memory at a time.

    The format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, the header, the tensors' bytes
    without a gap. The library's own writer takes all tensors at once.

    Raises:
        OSError: there is no room.
    """
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}")
    try:
        with unfinished.open("wb") as file:
            file.write(_header(weights))
            for tensor in weights.values():
                file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _header(weights: Converted) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in weights.shapes.items():
        start, end = end, end + math.prod(shape) * weights.dtype.itemsize
        entries[name] = {"dtype": _DTYPES[weights.dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def stored_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a safetensors file or of a folder of such, one at a time; of tied ones, one."""
    for each in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(each, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 no mapping
                yield name, file.get_tensor(name)


def exchange_folder(named: str, *, num_bytes: int) -> Path:
    """A new folder for such files: in ``named``, else in memory where three of them fit, else a temporary one."""
    if named:
        return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=named))
    return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=_MEMORY if fits_in_memory(num_bytes) else None))


def fits_in_memory(num_bytes: int) -> bool:
    """Whether three files of ``num_bytes`` have room in memory: what is served, what comes, and some to spare."""
    return _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3 * num_bytes


def max_positions(folder: Path) -> int:
    """How many tokens a checkpoint's model reads; ``sys.maxsize`` where there is no bound."""
    return architectures.max_positions(AutoConfig.from_pretrained(folder, local_files_only=True)) or sys.maxsize


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))
