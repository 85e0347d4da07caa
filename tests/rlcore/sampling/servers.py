"""Servers of tests: what they are started with, and shell scripts in the place of vLLM's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore.config import EngineConfig
from rlcore.sampling.vllm.process import ServerSpec


def server_spec(model: Path, folder: Path, *, engine: dict[str, Any] | None = None, **settings: Any) -> ServerSpec:
    """Return the specification of a server of float32 with 128 positions; ``engine``: settings of its EngineConfig."""
    config = EngineConfig(kind="vllm", **(engine or {}))
    given: dict[str, Any] = {"config": config, "dtype": "float32", "max_model_len": 128, "max_concurrent": 1}
    return ServerSpec(model=model, weight_dir=folder, **(given | settings))


def interpreter(folder: Path, *lines: str) -> str:
    """Write an interpreter that runs these lines of shell instead of Python."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)
    return str(path)
