"""The committed curve of a micro run, and the machine that computed it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rlcore.config import HardwareConfig
from rlcore.hardware.machine import find_machine
from rlcore.tasks.store.storage import read_table

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "micro_curve.json"
STAGES = ("grpo", "ppo")


def machine() -> dict[str, Any]:
    found = asdict(find_machine(HardwareConfig(device="cpu", num_threads=1)))
    return {**found, "torch": torch.__version__, "system": platform.system()}


def record(folders: dict[str, Path]) -> dict[str, Any]:
    """The curve of each RL run, and the rollouts of its first iteration; ``folders``: artifacts of :data:`STAGES`."""
    return {
        "curve": {stage: curve(folder) for stage, folder in folders.items()},
        "first": {stage: first_rollouts(folder) for stage, folder in folders.items()},
    }


def curve(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if "second" not in name and "memory" not in name}
        for row in json.loads((folder / "history.json").read_text())
    ]


def first_rollouts(folder: Path) -> list[dict[str, Any]]:
    table = read_table(folder / "rollouts" / "iteration-00001.parquet")
    return [
        {"prompt_id": row.prompt_id, "tokens": list(row.completion_ids), "logprobs": list(row.sampler_logprobs)}
        for row in table.itertuples()
    ]
