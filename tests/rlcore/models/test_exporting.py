"""An exported checkpoint in plain transformers: the same greedy answers as the evaluation's sampler gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.config import LoraConfig
from rlcore.errors import ModelError, StorageError
from rlcore.models.exporting import export_checkpoint
from rlcore.models.heads import HEAD_FILE
from rlcore.models.loading import load_policy, save_model
from rlcore.models.lora import add_lora
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, make_checkpoint, our_answers


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


def test_plain_transformers_gives_the_answers_of_the_evaluation(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out", readme="# a card\n")
    expected = [ids for ids, _ in our_answers(checkpoint)]
    assert plain_answers(tmp_path / "out") == expected
    assert len({len(ids) for ids in expected}) > 1  # some were ended by an EOS id, at different places
    assert (tmp_path / "out" / "README.md").read_text() == "# a card\n"
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    assert not (tmp_path / "out" / "model_card.json").exists()


def test_an_adapter_is_merged_and_left_out(checkpoint: Path, tmp_path: Path) -> None:
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


def test_the_precision_can_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    originals = load_file(checkpoint / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], originals[name].bfloat16()) for name in originals)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_weight_that_the_precision_cannot_hold_is_named_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(checkpoint, large)
    tensors = load_file(large / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e6
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is not finite in float16"):
        export_checkpoint(large, tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_an_empty_folder_is_filled_and_a_full_one_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(checkpoint, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match="not empty"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_language_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "scorer")
    (tmp_path / "scorer" / HEAD_FILE).write_bytes(b"")
    with pytest.raises(ModelError, match="reward model"):
        export_checkpoint(tmp_path / "scorer", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        export_checkpoint(tmp_path / "empty", tmp_path / "out")
