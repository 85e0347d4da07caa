"""A small model with its tokenizer, and prompts of unequal lengths."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt
from tests.rlcore.loop.conftest import make_components, start  # noqa: F401 - fixtures of runs

SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=128)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> ChatTokenizer:
    return ChatTokenizer.load(checkpoint)


@pytest.fixture(scope="session")
def stopping(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """The tokenizer with many EOS ids, one in eight: sequences end at many different lengths."""
    return dataclasses.replace(tokenizer, eos_ids=tuple(range(1, 262, 8)))


@pytest.fixture(scope="session")
def make_prompts(tokenizer: ChatTokenizer) -> Callable[..., list[Prompt]]:
    def make(*texts: str) -> list[Prompt]:
        conversations = [(Message(role="user", content=text),) for text in texts]
        return [
            Prompt(prompt_id=text, messages=turns, token_ids=tokenizer.render_prompt(turns), reference="", task="test")
            for text, turns in zip(texts, conversations, strict=True)
        ]

    return make


@pytest.fixture(scope="session")
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    return make_prompts("3+4", "12+30-7", "1", "8-2+5-1+6")
