"""Model folder and rows of a user, for the tests of the first day."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model

SHAPE = ShapeConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, max_positions=256)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with tokenizer and chat template, which tests copy and do not change."""
    folder = tmp_path_factory.mktemp("made") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


def rows(first: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Sixty rows of the contract ``prompts``."""
    return [
        {
            "prompt_id": f"q{number}",
            "messages": [{"role": "user", "content": f"What is {number} + 4?"}],
            "reference": f"{number + 4}",
            "task": "sums",
            **changes,
        }
        for number in range(first, first + 60)
    ]


def write(path: str, values: Iterable[object]) -> str:
    Path(path).write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
