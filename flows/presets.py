"""Presets by name or path."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.tasks.presets.run import Draft, RunConfig, load_preset, read_preset

FOLDER = Path(__file__).parent / "presets"


def open_preset(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a built-in preset (``tiny``) or a file (``path/to/mine.toml``), with overrides.

    Raises:
        ConfigError: no such preset, or errors in it, which are reported together.
    """
    return load_preset(preset_path(preset), overrides, library=FOLDER)


def open_draft(preset: str, overrides: Sequence[str] = ()) -> Draft:
    """Open a preset that may have errors, which preflight reports with all others.

    Raises:
        ConfigError: no such preset, or no TOML.
    """
    return read_preset(preset_path(preset), overrides, library=FOLDER)


def preset_path(preset: str) -> Path:
    """Return the file of a preset.

    Raises:
        ConfigError: there is none.
    """
    path = Path(preset) if preset.endswith(".toml") else FOLDER / f"{preset}.toml"
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        is_there = False
    if not is_there:
        known = sorted(file.stem for file in FOLDER.glob("*.toml"))
        near = get_close_matches(path.stem, known)
        fix = f"did you mean {' or '.join(near)}?" if near else f"name one of {', '.join(known)}, or a .toml file"
        if path.parent != FOLDER and not near:
            fix = "correct the path"
        raise ConfigError(f"no such preset or file: {preset}", fix=fix)
    return path
