"""Checkpoint folders: a model is saved whole, and loaded as it was saved."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.errors import ModelError, StorageError
from rlcore.models.loading import load_policy, save_model
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("loading") / "model")


def test_a_saved_model_is_loaded_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    model = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.5
    save_model(model, checkpoint, tmp_path / "saved")
    again = load_policy(tmp_path / "saved", device=CPU, dtype=torch.float32)
    assert not again.training
    assert again.config.use_cache is False
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert ChatTokenizer.load(tmp_path / "saved").eos_ids == ChatTokenizer.load(checkpoint).eos_ids
    with pytest.raises(StorageError, match="exists already"):
        save_model(model, checkpoint, tmp_path / "saved")


def digits(folder: Path) -> set[torch.dtype]:
    """The precisions of all weights in a folder."""
    return {tensor.dtype for path in folder.glob("*.safetensors") for tensor in load_file(path).values()}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", ["1GB", "100KB"])
def test_what_began_in_half_precision_is_saved_in_it_and_in_float32_where_that_is_asked_for(
    checkpoint: Path, tmp_path: Path, half: torch.dtype, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    load_policy(checkpoint, device=CPU, dtype=half).save_pretrained(start)
    assert digits(start) == {half}
    model = load_policy(start, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-3
    monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size=shards))
    save_model(model, start, tmp_path / "half", like_start=True)
    save_model(model, start, tmp_path / "whole")
    assert digits(tmp_path / "half") == {half} and digits(tmp_path / "whole") == {torch.float32}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == str(half).removeprefix("torch.")
    for index in (tmp_path / "half").glob("*.index.json"):
        assert json.loads(index.read_text())["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    again = load_policy(tmp_path / "half", device=CPU, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.to(half).float())
    assert model.dtype == torch.float32  # what learns is as it was
    # What began in float32 ends in it.
    save_model(model, checkpoint, tmp_path / "float32", like_start=True)
    assert digits(tmp_path / "float32") == {torch.float32}


def test_a_model_is_saved_whole_or_not_at_all(checkpoint: Path, tmp_path: Path) -> None:
    model = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        save_model(model, tmp_path, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_weights_are_loaded_in_the_precision_that_is_asked_for(checkpoint: Path) -> None:
    assert load_policy(checkpoint, device=CPU, dtype=torch.bfloat16).dtype == torch.bfloat16
