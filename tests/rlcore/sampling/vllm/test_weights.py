"""Weights that go to another process are whole, or they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.sampling.vllm.weights import (
    Converted,
    adapter_mismatches,
    checkpoint_shapes,
    make_weight_dir,
    shape_mismatches,
    stored_tensors,
    write_weights,
)


def test_the_file_holds_every_stored_tensor_once_in_the_engines_precision(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    shapes = checkpoint_shapes(checkpoint)
    assert shape_mismatches(shapes, model.state_dict()) == []
    write_weights(Converted(model.state_dict(), shapes=shapes, dtype=torch.bfloat16), tmp_path / "w.safetensors")
    written = load_file(tmp_path / "w.safetensors")
    for path in (tmp_path, tmp_path / "w.safetensors"):
        assert {name: tensor.sum().item() for name, tensor in stored_tensors(path)} == {
            name: tensor.sum().item() for name, tensor in written.items()
        }
    assert set(written) == set(model.state_dict()) - {"lm_head.weight"}  # tied to the embedding
    for name, tensor in written.items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())


@pytest.mark.parametrize("length", range(1, 9))
def test_the_tensors_begin_at_a_multiple_of_8_bytes_as_the_format_has_it(length: int, tmp_path: Path) -> None:
    state = {"n" * length: torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    path = tmp_path / "w.safetensors"
    write_weights(Converted(state, shapes=shapes, dtype=torch.float16), path)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    read = load_file(path)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"n" * length: 2.5, "empty": []}
    assert [*tmp_path.iterdir()] == [path]


def test_weights_that_are_not_the_whole_model_are_named(checkpoint: Path, model: PreTrainedModel) -> None:
    shapes, state = checkpoint_shapes(checkpoint), model.state_dict()
    norm = "model.norm.weight"
    assert shape_mismatches(shapes, {name: tensor for name, tensor in state.items() if name != norm}) == [
        f"{norm} is missing"
    ]
    assert shape_mismatches(shapes, {**state, norm: torch.ones(3)}) == [f"{norm} has a different shape"]
    assert shape_mismatches(shapes, {**state, "extra": torch.ones(3)}) == [
        "extra is unknown, or tied in the engine and different here"
    ]
    untied = {**state, "lm_head.weight": state["lm_head.weight"] + 1.0}
    assert shape_mismatches(shapes, untied) == ["lm_head.weight is unknown, or tied in the engine and different here"]
    assert shape_mismatches(shapes, {**state, "lm_head.weight": state["lm_head.weight"].clone()}) == []


@pytest.mark.parametrize("named", [True, False])
def test_every_run_has_an_exchange_folder_of_its_own(tmp_path: Path, named: bool) -> None:
    one, other = (make_weight_dir(str(tmp_path) if named else "", num_bytes=10) for _ in range(2))
    assert one != other
    assert (one.parent == tmp_path) == named
    one.rmdir()
    other.rmdir()


def test_an_adapter_of_another_model_is_named() -> None:
    shapes = {"q.weight": (4, 8), "k.weight": (2, 8)}
    assert adapter_mismatches(shapes, {"q.weight": (4, 8)}) == []
    assert adapter_mismatches(shapes, {"q.weight": (8, 4), "k.weight": (2, 8), "v.weight": (2, 8)}) == [
        "q.weight has no weight of the adapter's shape",
        "v.weight has no weight of the adapter's shape",
    ]
