"""Which engine a run gets, in which precision, and what is refused before one is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RejectionConfig, SamplingConfig, ShapeConfig
from rlcore.errors import ConfigError, SamplingError
from rlcore.models.loading import import_model
from rlcore.sampling.native import NativeSampler
from rlcore.tokenization import ChatTokenizer
from tasks.rollout_engine import engine_dtype, open_engine, sync_dtype
from tasks.runtime import Runtime

CPU = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


def sampling(**engine: object) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=8, engine=EngineConfig(**engine))  # type: ignore[arg-type]


def test_the_engine_is_the_built_in_one_unless_another_is_named(checkpoint: Path) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    with open_engine(checkpoint, tokenizer, SamplingConfig(max_new_tokens=8), CPU, print) as engine:
        assert isinstance(engine, NativeSampler)


def test_an_engine_that_cannot_be_is_refused_and_leaves_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    with (
        pytest.raises(ConfigError, match="the model has 128 positions"),
        open_engine(checkpoint, tokenizer, sampling(kind="vllm", max_model_len=129), CPU, print),
    ):
        pass
    missing = sampling(kind="vllm", python=str(tmp_path / "none"), exchange=str(tmp_path))
    with (
        pytest.raises(SamplingError, match="there is no interpreter"),
        open_engine(checkpoint, tokenizer, missing, CPU, print),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_canary_allows_what_the_coarser_precision_of_the_two_needs() -> None:
    half = dataclasses.replace(CPU, compute_dtype=torch.bfloat16)
    assert engine_dtype(sampling(kind="vllm"), half) == torch.bfloat16
    assert engine_dtype(sampling(kind="vllm", dtype="float32"), half) == torch.float32
    assert engine_dtype(sampling(dtype="bfloat16"), CPU) == torch.float32  # the native engine is the trainer's
    assert sync_dtype(sampling(kind="vllm", dtype="float32"), half) == torch.bfloat16
    assert sync_dtype(sampling(kind="vllm", dtype="bfloat16"), CPU) == torch.bfloat16
    assert sync_dtype(sampling(kind="vllm"), CPU) == torch.float32


def test_rejection_sampling_has_no_engine_to_choose() -> None:
    with pytest.raises(ConfigError, match="rejection sampling uses the native engine"):
        RejectionConfig(num_samples=1, rewards=(), sampling=sampling(kind="vllm"))
    with pytest.raises(ConfigError, match="has no updates to run ahead of"):
        RejectionConfig(num_samples=1, rewards=(), sampling=SamplingConfig(max_new_tokens=8, staleness=1))
