"""Fixtures of the first day: a user's own model folder."""

from __future__ import annotations

from pathlib import Path

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
