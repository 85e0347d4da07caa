"""Weights as a file that another process reads: checked against the checkpoint that the engine was started from."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
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


def write_weights(
    shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor], path: Path, *, dtype: torch.dtype
) -> None:
    """Save the stored names of ``state`` in ``dtype``.

    Raises:
        OSError, SafetensorError: there is no room.
    """
    tensors = {name: state[name].detach().to("cpu", dtype, copy=True).contiguous() for name in shapes}
    save_file(tensors, path, metadata={"format": "pt"})


def exchange_folder(named: str, *, num_bytes: int) -> Path:
    """A new folder for such files: in ``named``, else in memory where three of them fit, else a temporary one."""
    if named:
        return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=named))
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3 * num_bytes
    return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=_MEMORY if in_memory else None))


def max_positions(folder: Path) -> int:
    """How many tokens a checkpoint's model reads."""
    positions: int = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return positions


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))
