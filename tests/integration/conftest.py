"""Set-up of the tests of a real vLLM server: a checkpoint per module, its tokenizer and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import TransferKind
from rlcore.models.loading import load_policy
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.integration import vllm_runs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_runs.make_checkpoint(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> ChatTokenizer:
    return ChatTokenizer.load(checkpoint)


@pytest.fixture(scope="module")
def prompts(tokenizer: ChatTokenizer) -> list[Prompt]:
    return vllm_runs.make_prompts(tokenizer)


@pytest.fixture(scope="module")
def trained(checkpoint: Path) -> PreTrainedModel:
    """The learner's model; the tests move its weights."""
    return load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def native(trained: PreTrainedModel, tokenizer: ChatTokenizer) -> NativeSampler:
    return NativeSampler(trained, tokenizer)


@pytest.fixture(scope="module", params=["shared_memory", "gloo"])
def transfer(request: pytest.FixtureRequest) -> TransferKind:
    kind: TransferKind = request.param
    return kind
