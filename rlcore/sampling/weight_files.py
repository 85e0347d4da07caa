"""Weights as a file that another process reads: checked against the checkpoint that the engine was started from."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_MEMORY = Path("/dev/shm")  # a file there never touches a disk


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
    """The tensors ``names`` of ``state`` in ``dtype``, contiguous, on their device; made when read and not kept."""

    def __init__(self, state: Mapping[str, torch.Tensor], *, names: Iterable[str], dtype: torch.dtype) -> None:
        self._state, self._names, self._dtype = state, tuple(names), dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[name].detach().to(self._dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save them as they are.

    Raises:
        OSError, SafetensorError: there is no room.
    """
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})


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
    """How many tokens a checkpoint's model reads."""
    positions: int = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return positions


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))
