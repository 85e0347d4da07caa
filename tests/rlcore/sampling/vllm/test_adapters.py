from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.config import EngineConfig, LoraConfig
from rlcore.errors import SamplingError
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec, command, environment
from rlcore.sampling.vllm.server_sync import publish
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack

ADDRESS = Address("127.0.0.1", 1)


@pytest.fixture
def policy(model: PreTrainedModel) -> AdaptedModel:
    adapted = add_lora(model, LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj")), "policy", seed=0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += 0.1
    return adapted


@pytest.fixture
def spec(checkpoint: Path, tmp_path: Path) -> ServerSpec:
    return ServerSpec(
        model=checkpoint,
        weight_dir=tmp_path,
        config=EngineConfig(kind="vllm"),
        dtype="float32",
        max_model_len=128,
        max_concurrent=1,
        lora_rank=4,
    )


def test_a_server_with_room_for_an_adapter_is_sent_nothing_else(policy: AdaptedModel, spec: ServerSpec) -> None:
    weights = pack(MergedState(policy), spec.weight_dir / "0", spec=spec, shapes=checkpoint_shapes(spec.model))
    assert weights.is_adapter
    assert sorted(path.name for path in weights.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    stored = load_file(weights.path / "adapter_model.safetensors")
    assert len(stored) == 2 * 2 * 2  # A and B of two layers' two targets
    discard(weights.path)
    assert list(spec.weight_dir.iterdir()) == []


def test_a_server_without_is_sent_the_merged_weights(policy: AdaptedModel, spec: ServerSpec) -> None:
    plain = dataclasses.replace(spec, lora_rank=0)
    shapes = checkpoint_shapes(spec.model)
    weights = pack(MergedState(policy), spec.weight_dir / "0", spec=plain, shapes=shapes)
    assert not weights.is_adapter
    stored, merged = dict(weights.tensors()), MergedState(policy)
    assert stored.keys() == shapes.keys()
    assert all(torch.equal(stored[name], merged[name]) for name in shapes)
    discard(weights.path)
    assert list(spec.weight_dir.iterdir()) == []


def test_an_adapter_of_another_model_is_refused_before_it_is_sent(policy: AdaptedModel, spec: ServerSpec) -> None:
    shapes = {name: shape for name, shape in checkpoint_shapes(spec.model).items() if "layers.1" not in name}
    with pytest.raises(SamplingError, match=r"layers\.1\.mlp\.down_proj\.weight has no weight of the adapter's shape"):
        pack(MergedState(policy), spec.weight_dir / "0", spec=spec, shapes=shapes)
    assert list(spec.weight_dir.iterdir()) == []


def test_an_adapter_takes_the_place_of_the_one_before_while_the_engine_is_paused(tmp_path: Path) -> None:
    asked = []

    class Quiet(EngineControl):
        def ask(self, path: str, payload: object, *, seconds: float = 0.0) -> dict[str, bool]:
            asked.append((path.partition("?")[0], payload))
            return {"success": True}

    group = ControlGroup([Quiet(ADDRESS, log_tail=str)])
    publish(group, Weights(path=tmp_path, is_adapter=True), 3, lambda weights: pytest.fail("no whole weights are sent"))
    adapter = {"lora_name": "policy", "lora_path": str(tmp_path), "load_inplace": True}
    assert asked == [
        ("/pause", {}),
        ("/v1/load_lora_adapter", adapter),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "3"}),
        ("/resume", {}),
    ]


@pytest.mark.parametrize(("rank", "room"), [(1, "8"), (8, "8"), (9, "16"), (300, "320"), (512, "512")])
def test_a_server_is_started_with_room_for_the_rank(rank: int, room: str, spec: ServerSpec) -> None:
    line = command(dataclasses.replace(spec, lora_rank=rank), "python", ADDRESS)
    assert line[line.index("--max-lora-rank") + 1] == room
    assert "--enable-lora" in line
    assert environment(spec, spec.weight_dir)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    none = dataclasses.replace(spec, lora_rank=0)
    assert "--enable-lora" not in command(none, "python", ADDRESS)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(none, spec.weight_dir)
