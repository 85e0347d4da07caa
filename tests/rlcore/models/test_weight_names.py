"""Weights by the names of a checkpoint, converted one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.models import weight_names
from rlcore.models.weight_names import to_checkpoint_names
from rlcore.sampling.vllm.weights import checkpoint_shapes
from tests import strategies
from tests.rlcore.models.zoo import ARCHITECTURES, make

(MIXTURE,) = [each for each in ARCHITECTURES if each.model_type == "qwen3_moe"]


class Watched(dict[str, torch.Tensor]):
    """A state that remembers what was read of it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(state)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def test_a_state_that_is_stored_as_it_lies_in_memory_is_handed_on(tmp_path: Path) -> None:
    model = strategies.tiny_llama()
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    assert to_checkpoint_names(state, tmp_path) is state


def test_experts_are_named_one_by_one_and_converted_when_they_are_read(tmp_path: Path) -> None:
    model = make(MIXTURE)
    model.save_pretrained(tmp_path)
    watched = Watched(model.state_dict())
    state = to_checkpoint_names(watched, tmp_path)
    assert set(state) == set(checkpoint_shapes(tmp_path))
    assert len(state) == len(checkpoint_shapes(tmp_path))
    assert watched.read == []
    layer = model.model.layers[1].mlp.experts
    assert torch.equal(state["model.layers.1.mlp.experts.2.down_proj.weight"], layer.down_proj[2])
    gate, up = layer.gate_up_proj[3].chunk(2)
    assert torch.equal(state["model.layers.1.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(state["model.layers.1.mlp.experts.3.up_proj.weight"], up)
    assert watched.read == [f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]


def test_a_conversion_of_several_tensors_at_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(MIXTURE).save_pretrained(tmp_path)
    exact = weight_names.revert_weight_conversion

    def half(model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return exact(model, state) if len(state) > 1 else {}

    monkeypatch.setattr(weight_names, "revert_weight_conversion", half)
    with pytest.raises(ModelError, match="cannot be converted to checkpoint names"):
        to_checkpoint_names({}, tmp_path)
