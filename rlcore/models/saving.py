"""Atomic writing of checkpoint folders, and digests of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from rlcore.errors import StorageError
from rlcore.models.files import files_digest, remove_abandoned, unfinished_folder


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``folder`` if the block succeeds.

    Raises:
        StorageError: The folder exists, or cannot be written; nothing is left behind.
    """
    if folder.exists():
        raise StorageError("the folder exists already", where=str(folder), fix="remove it, or name another one")
    try:
        remove_abandoned(folder.parent, unfinished_prefix(folder))
        with unfinished_folder(folder.parent, unfinished_prefix(folder)) as temporary:
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files with mode 0600
                fsync(path)
            temporary.rename(folder)
            fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the checkpoint could not be written: {error}",
            where=str(folder),
            fix="free space or correct the permissions, then start again",
        ) from error


def unfinished_prefix(folder: Path) -> str:
    """Return the name prefix of temporary folders that become ``folder``, in the same parent."""
    return f".tmp-{folder.name}-"


HEAD_FILE = "scalar_head.safetensors"  # of a critic or reward model, next to its backbone
_LENGTH = 8  # bytes of the length before a safetensors header


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whose bytes depend only on its content.

    Metadata are sorted; the library's order differs between processes.
    """
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    if not metadata or len(metadata) == 1:
        return
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        file.seek(_LENGTH)
        file.write(text.ljust(length))


_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def cast_like(folder: Path, start: Path) -> None:
    """Round the weights in ``folder`` to half precision if the same weights in ``start`` are in it."""
    kinds: dict[str, torch.dtype] = {}
    for path in start.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found = ((name, file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118 - no mapping
            kinds |= {name: _HALVES[kind] for name, kind in found if kind in _HALVES}
    if kinds:
        cast_weights(folder, lambda name, value: kinds.get(name, value.dtype), dtype=_dtype_of(start))


def cast_weights(folder: Path, choose: Callable[[str, torch.Tensor], torch.dtype], *, dtype: str) -> None:
    """Rewrite the weights in ``folder`` in the precision that ``choose`` returns for a name and tensor.

    ``dtype``: precision to record in config.json.
    """
    num_bytes = 0
    for path in folder.glob("*.safetensors"):
        tensors = {name: value.to(choose(name, value)) for name, value in load_file(path).items()}
        num_bytes += sum(value.nbytes for value in tensors.values())
        save_tensors(tensors, path, {"format": "pt"})
    _edit(folder / "config.json", lambda config: config | {"dtype": dtype})
    for index in folder.glob("*.safetensors.index.json"):
        _edit(index, lambda found: found | {"metadata": found["metadata"] | {"total_size": num_bytes}})


def _dtype_of(start: Path) -> str:
    config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype"))


def _edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    text = json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of the folder's safetensors files, in the order of their names."""
    return files_digest(sorted(folder.glob("*.safetensors")))


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
