"""Which engine a run gets, in which precision, and what is refused before one is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlcore.config import AdapterConfig, EngineConfig, ModelConfig, RejectionConfig, SamplingConfig, ShapeConfig
from rlcore.errors import ConfigError, SamplingError
from rlcore.models.loading import import_model
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm_process import ServerSpec
from rlcore.tokenization import ChatTokenizer
from tasks.rollout_engine import engine_dtype, open_engine, server_specs, sync_dtype
from tasks.runtime import Runtime

CPU = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
NONE = AdapterConfig()
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
    with open_engine(checkpoint, tokenizer, SamplingConfig(max_new_tokens=8), CPU, print, adapter=NONE) as engine:
        assert isinstance(engine, NativeSampler)


def test_an_engine_that_cannot_be_is_refused_and_leaves_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    with (
        pytest.raises(ConfigError, match="the model has 128 positions"),
        open_engine(checkpoint, tokenizer, sampling(kind="vllm", max_model_len=129), CPU, print, adapter=NONE),
    ):
        pass
    missing = sampling(kind="vllm", python=str(tmp_path / "none"), exchange=str(tmp_path))
    with (
        pytest.raises(SamplingError, match="there is no interpreter"),
        open_engine(checkpoint, tokenizer, missing, CPU, print, adapter=NONE),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_vllm_in_this_process_needs_vllm_and_has_no_servers_to_set(checkpoint: Path) -> None:
    tokenizer = ChatTokenizer.load(checkpoint)
    with (
        pytest.raises(SamplingError, match="vLLM is not installed in this environment"),
        open_engine(checkpoint, tokenizer, sampling(kind="vllm_inprocess"), CPU, print, adapter=NONE),
    ):
        pass
    for setting in ({"python": "python"}, {"urls": ("http://a:1",)}, {"replicas": 2}, {"transfer": "gloo"}):
        with pytest.raises(ConfigError, match="are of servers"):
            sampling(kind="vllm_inprocess", **setting)  # type: ignore[arg-type]


def test_servers_share_what_is_under_way_and_an_adapter_goes_only_to_those_of_ours(checkpoint: Path) -> None:
    def specs(rank: int, **engine: object) -> list[ServerSpec]:
        config = EngineConfig(kind="vllm", **engine)  # type: ignore[arg-type]
        whole = ServerSpec(
            model=checkpoint, exchange=Path(), config=config, dtype="float32", max_model_len=128, max_concurrent=9
        )
        made = server_specs(whole, torch.device("cpu"), AdapterConfig(rank=rank))
        for each in made:
            each.exchange.rmdir()  # it is there, and empty
        return made

    two = specs(4, replicas=2)
    assert [spec.max_concurrent for spec in two] == [5, 5]
    assert len({spec.exchange for spec in two}) == 2
    assert [(spec.transfer, spec.adapter_rank, spec.url) for spec in two] == [("shared_memory", 4, "")] * 2
    (attached,) = specs(4, urls=("http://a:1",))
    assert (attached.transfer, attached.adapter_rank, attached.url) == ("file", 0, "http://a:1")
    assert [specs(rank)[0].adapter_rank for rank in (0, 512, 513)] == [0, 512, 0]


def test_the_canary_allows_what_the_coarser_precision_of_the_two_needs() -> None:
    half = dataclasses.replace(CPU, compute_dtype=torch.bfloat16)
    assert engine_dtype(sampling(kind="vllm"), half) == torch.bfloat16
    assert engine_dtype(sampling(kind="vllm", dtype="float32"), half) == torch.float32
    assert engine_dtype(sampling(dtype="bfloat16"), CPU) == torch.float32  # the native engine is the trainer's
    assert sync_dtype(sampling(kind="vllm", dtype="float32"), half) == torch.bfloat16
    assert sync_dtype(sampling(kind="vllm", dtype="bfloat16"), CPU) == torch.bfloat16
    assert sync_dtype(sampling(kind="vllm"), CPU) == torch.float32
    assert sync_dtype(sampling(kind="vllm_inprocess", dtype="bfloat16"), CPU) == torch.bfloat16


def test_rejection_sampling_has_no_engine_to_choose() -> None:
    with pytest.raises(ConfigError, match="rejection sampling uses the native engine"):
        RejectionConfig(num_samples=1, rewards=(), sampling=sampling(kind="vllm"))
    with pytest.raises(ConfigError, match="has no updates to run ahead of"):
        RejectionConfig(num_samples=1, rewards=(), sampling=SamplingConfig(max_new_tokens=8, staleness=1))
