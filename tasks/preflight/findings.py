"""Findings of the checks before a run, grouped by the file that has to be corrected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An error: the file that has it (empty: the preset), and a line that begins with the preset's key."""

    file: str = ""
    text: str


def key_of(text: str) -> str:
    """Return the key with which the line of an error begins."""
    return text.partition(":")[0].partition(" = ")[0]


def refusal(findings: Sequence[Finding], notes: Iterable[str], *, preset: str) -> ConfigError:
    """Return one error with all findings, by file, followed by notes. ``preset``: its file, or a built-in's name."""
    own_file = preset if preset.endswith(".toml") else f"preset {preset}"
    files = dict.fromkeys(finding.file for finding in findings)
    lines = []
    for file in files:
        own = [f"    {finding.text}" for finding in findings if finding.file == file]
        lines += [f"  {file or own_file}:", *own] if any(files) else own
    lines += [f"    {note}" for note in notes]
    plural = "s" if len(findings) > 1 else ""
    return ConfigError(
        f"preset has {len(findings)} error{plural}:\n" + "\n".join(lines),
        where=own_file,
        fix="correct these; nothing was run",
    )
