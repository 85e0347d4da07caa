"""Stages that end with the weights of their start, as ``seal.json`` next to their models says. It needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

SEAL = "seal.json"


def is_unchanged(folder: Path) -> bool:
    """Return True if training left the weights of its start as they were, by ``seal.json`` in ``folder``."""
    path = folder / SEAL
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("unchanged") is True
