"""Checkpoint folders: saved whole or not at all, loaded, exported, and their digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import LoraConfig
from rlcore.errors import ModelError, StorageError
from rlcore.models.files import abandoned, files_digest, remove_abandoned, unfinished_folder
from rlcore.models.loading import export_checkpoint, load_policy, save_model
from rlcore.models.lora import add_lora
from rlcore.models.saving import HEAD_FILE, atomic_folder, cast_like, save_tensors, weights_digest
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, make_checkpoint, our_answers

ROOT = Path(__file__).resolve().parents[3]


def write_checkpoint(folder: Path, dtype: str, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "hidden_size": 2}), encoding="utf-8")
    return folder


def test_atomic_folder_is_named_when_complete(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("text", encoding="utf-8")
        (folder / "sub" / "file").chmod(0o600)
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "sub" / "file").read_text(encoding="utf-8") == "text"
    assert (tmp_path / "made" / "sub" / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_failed_atomic_folder_is_removed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No space"), atomic_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("half", encoding="utf-8")
        raise OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "made") as folder:
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(StorageError, match="exists already"), atomic_folder(tmp_path / "made"):
        pytest.fail("the block ran")


def test_cast_like_start(tmp_path: Path) -> None:
    exact = torch.tensor([1.0009765625])  # between two neighbours of bfloat16
    start = write_checkpoint(tmp_path / "start", "bfloat16", backbone=exact.bfloat16(), norm=exact)
    made = write_checkpoint(tmp_path / "made", "float32", backbone=exact, norm=exact, head=exact)
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


def test_weights_digest_by_hand(tmp_path: Path) -> None:
    for name, text in (("b.safetensors", b"two"), ("a.safetensors", b"one"), ("config.json", b"{}")):
        (tmp_path / name).write_bytes(text)
    assert weights_digest(tmp_path) == hashlib.sha256(b"onetwo").hexdigest()
    assert files_digest([tmp_path / "config.json"]) == hashlib.sha256(b"{}").hexdigest()
    assert files_digest([]) == hashlib.sha256(b"").hexdigest()


def test_save_tensors_is_deterministic(tmp_path: Path) -> None:
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


def test_only_save_tensors_writes_safetensors() -> None:
    others = [path for folder in ("rlcore", "tasks") for path in (ROOT / folder).rglob("*.py") if path.stem != "saving"]
    assert [path for path in others if "save_file(" in path.read_text(encoding="utf-8")] == []


CPU = torch.device("cpu")


def test_saved_model_round_trip(checkpoint: Path, tmp_path: Path) -> None:
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


def precisions_of(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for path in folder.glob("*.safetensors") for tensor in load_file(path).values()}


@pytest.mark.parametrize(("half", "shards"), [(torch.bfloat16, "1GB"), (torch.float16, "100KB")])
def test_model_is_saved_in_precision_of_start(
    checkpoint: Path, tmp_path: Path, half: torch.dtype, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    load_policy(checkpoint, device=CPU, dtype=half).save_pretrained(start)
    assert precisions_of(start) == {half}
    model = load_policy(start, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-3
    monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size=shards))
    save_model(model, start, tmp_path / "half", like_start=True)
    save_model(model, start, tmp_path / "whole")
    assert precisions_of(tmp_path / "half") == {half} and precisions_of(tmp_path / "whole") == {torch.float32}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == str(half).removeprefix("torch.")
    for index in (tmp_path / "half").glob("*.index.json"):
        assert json.loads(index.read_text())["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    again = load_policy(tmp_path / "half", device=CPU, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.to(half).float())
    assert model.dtype == torch.float32  # what learns is as it was
    # What began in float32 ends in it.
    save_model(model, checkpoint, tmp_path / "float32", like_start=True)
    assert precisions_of(tmp_path / "float32") == {torch.float32}


def test_model_is_saved_whole_or_not(checkpoint: Path, tmp_path: Path) -> None:
    model = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        save_model(model, tmp_path, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exporting") / "model")


def plain_answers(folder: Path) -> list[tuple[int, ...]]:
    """Token ids of greedy answers, as a page of transformers' documentation says to get them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        inputs = tokenizer.apply_chat_template(
            conversation(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        found.append(tuple(ids[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


def test_exported_model_answers_alike_in_transformers(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out", readme="# a card\n")
    expected = [ids for ids, _ in our_answers(checkpoint)]
    assert plain_answers(tmp_path / "out") == expected
    assert len({len(ids) for ids in expected}) > 1  # some were ended by an EOS id, at different places
    assert (tmp_path / "out" / "README.md").read_text() == "# a card\n"
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    assert not (tmp_path / "out" / "model_card.json").exists()


def test_export_merges_adapter(checkpoint: Path, tmp_path: Path) -> None:
    base = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    policy = add_lora(base, LoraConfig(rank=4, alpha=8), "policy", seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_model(policy, checkpoint, tmp_path / "trained")
    assert (tmp_path / "trained" / "adapter").is_dir()
    export_checkpoint(tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out" / "adapter").exists()
    found = plain_answers(tmp_path / "out")
    assert found == [ids for ids, _ in our_answers(tmp_path / "trained")]
    assert found != [ids for ids, _ in our_answers(checkpoint)]


def test_export_in_chosen_precision(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    originals = load_file(checkpoint / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], originals[name].bfloat16()) for name in originals)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_export_refuses_overflowing_weight(checkpoint: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(checkpoint, large)
    tensors = load_file(large / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e6
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is not finite in float16"):
        export_checkpoint(large, tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_export_needs_empty_folder(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(checkpoint, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match="not empty"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_export_refuses_reward_model(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "scorer")
    (tmp_path / "scorer" / HEAD_FILE).write_bytes(b"")
    with pytest.raises(ModelError, match="reward model"):
        export_checkpoint(tmp_path / "scorer", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        export_checkpoint(tmp_path / "empty", tmp_path / "out")


def test_unfinished_folder_belongs_to_writer(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path / "new", ".tmp-") as folder:
        assert folder.parent == tmp_path / "new"
        assert list(abandoned(folder.parent, ".tmp-")) == []
        remove_abandoned(folder.parent, ".tmp-")
        assert folder.is_dir()
    assert not folder.exists()


def test_renamed_unfinished_folder_stays(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path, ".tmp-") as folder:
        folder.rename(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_only_abandoned_folders_are_removed(tmp_path: Path) -> None:
    theirs = (".tmp-other-0123abcd", ".tmp-out-mine", "out")
    for name in (".tmp-out-", ".tmp-out-0123abcd", ".tmp-out-4567cdef", *theirs):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-out-00000000").touch()
    (tmp_path / ".tmp-out-11111111").symlink_to(tmp_path / "out")
    remove_abandoned(tmp_path, ".tmp-out-")
    left = {*theirs, ".tmp-out-00000000", ".tmp-out-11111111"}
    assert {path.name for path in tmp_path.iterdir()} == left
    remove_abandoned(tmp_path / "nowhere", ".tmp-")


def test_unfinished_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".tmp-0123abcd").mkdir()
    with unfinished_folder(tmp_path, ".tmp-") as folder:
        remove_abandoned(tmp_path, ".tmp-")
        assert {path.name for path in tmp_path.iterdir()} == {".tmp-0123abcd", folder.name}
