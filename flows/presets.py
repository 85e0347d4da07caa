"""Presets by name or path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.tasks.presets.run import RunConfig, load_preset, read_preset

FOLDER = Path(__file__).parent / "presets"


def open_preset(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a committed preset (``tiny``) or of a file (``path/to/mine.toml``), with overrides.

    Raises:
        ConfigError: no such preset, or an error in it (all errors are named together).
    """
    return load_preset(preset_path(preset), overrides, library=FOLDER)


def open_unvalidated(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As :func:`open_preset`, but the graph may have errors: preflight names them among all others.

    Raises:
        ConfigError: no such preset, or keys and values that cannot be read (all of them are named at once).
    """
    return read_preset(preset_path(preset), overrides, library=FOLDER)


def preset_path(preset: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: there is none.
    """
    path = Path(preset) if preset.endswith(".toml") else FOLDER / f"{preset}.toml"
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        is_there = False
    if not is_there:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        raise ConfigError(
            f"there is no preset {preset!r}", where=str(path), fix=f"name one of {known}, or the path of a .toml file"
        )
    return path
