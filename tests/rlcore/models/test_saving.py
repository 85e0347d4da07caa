"""Checkpoint folders that are whole or not there, rounding like the start, and digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlcore.errors import StorageError
from rlcore.models.saving import atomic_folder, cast_like, files_digest, save_tensors, weights_digest

ROOT = Path(__file__).resolve().parents[3]


def checkpoint(folder: Path, dtype: str, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "hidden_size": 2}), encoding="utf-8")
    return folder


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("text", encoding="utf-8")
        (folder / "sub" / "file").chmod(0o600)
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "sub" / "file").read_text(encoding="utf-8") == "text"
    assert (tmp_path / "made" / "sub" / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_nothing_is_left_of_a_folder_that_failed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No space"), atomic_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("half", encoding="utf-8")
        raise OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "made") as folder:
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(StorageError, match="exists already"), atomic_folder(tmp_path / "made"):
        pytest.fail("the block ran")


def test_weights_become_half_where_those_of_the_start_are_half(tmp_path: Path) -> None:
    exact = torch.tensor([1.0009765625])  # between two neighbours of bfloat16
    start = checkpoint(tmp_path / "start", "bfloat16", backbone=exact.bfloat16(), norm=exact)
    made = checkpoint(tmp_path / "made", "float32", backbone=exact, norm=exact, head=exact)
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12}}), encoding="utf-8")
    cast_like(made, start)
    found = load_file(made / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {
        "backbone": torch.bfloat16,
        "norm": torch.float32,
        "head": torch.float32,
    }
    assert float(found["backbone"]) == 1.0
    assert torch.equal(found["norm"], exact)
    assert json.loads((made / "config.json").read_text(encoding="utf-8")) == {"dtype": "bfloat16", "hidden_size": 2}
    index = json.loads((made / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index == {"metadata": {"total_size": 2 + 4 + 4}}


def test_nothing_is_touched_where_the_start_is_whole(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", "float32", backbone=torch.ones(2))
    made = checkpoint(tmp_path / "made", "float32", backbone=torch.ones(2))
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    cast_like(made, start)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


def test_the_digest_of_weights_is_of_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    for name, text in (("b.safetensors", b"two"), ("a.safetensors", b"one"), ("config.json", b"{}")):
        (tmp_path / name).write_bytes(text)
    assert weights_digest(tmp_path) == hashlib.sha256(b"onetwo").hexdigest()
    assert files_digest([tmp_path / "config.json"]) == hashlib.sha256(b"{}").hexdigest()
    assert files_digest([]) == hashlib.sha256(b"").hexdigest()


def test_equal_tensors_and_metadata_are_equal_bytes_in_whichever_order_they_are_given(tmp_path: Path) -> None:
    """The library's own writer draws an order: of twelve keys it would hit the sorted one once in 12! times."""
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    metadata = {f"key {n}": f'"ä{n}" \\ \n' for n in range(12)}
    for turn in (1, -1):
        again = dict([*metadata.items()][::turn])
        save_tensors(dict([*tensors.items()][::turn]), tmp_path / f"{turn}.safetensors", again)
    first, second = (tmp_path / f"{turn}.safetensors" for turn in (1, -1))
    assert first.read_bytes() == second.read_bytes()
    length = int.from_bytes(first.read_bytes()[:8], "little")
    assert list(json.loads(first.read_bytes()[8 : 8 + length])["__metadata__"]) == sorted(metadata)
    with safe_open(first, framework="pt") as file:
        assert file.metadata() == metadata
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(first).items())


def test_every_file_of_tensors_is_written_by_the_one_function() -> None:
    others = [path for folder in ("rlcore", "tasks") for path in (ROOT / folder).rglob("*.py") if path.stem != "saving"]
    assert [path for path in others if "save_file(" in path.read_text(encoding="utf-8")] == []
