"""Stages that end with the weights of their start, by the digests next to their models. It needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

SEAL = "seal.json"


def is_unchanged(folder: Path) -> bool:
    """Return True if training left the weights of its start as they were, by the digests in ``folder``."""
    path = folder / SEAL
    seal = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return "start" in seal and seal["start"] == seal["weights"]
