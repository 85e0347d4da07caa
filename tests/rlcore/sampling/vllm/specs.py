"""A server of the tests: of a small model, in float32, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcore.config import EngineConfig
from rlcore.sampling.vllm.process import ServerSpec


def make_spec(model: Path, weight_dir: Path, python: str = "", **settings: Any) -> ServerSpec:
    """The spec of a server; ``python``: the interpreter that it is started with."""
    own = {"config": EngineConfig(kind="vllm", python=python), "dtype": "float32", "max_model_len": 128}
    return ServerSpec(model=model, weight_dir=weight_dir, **(own | {"max_concurrent": 1} | settings))
