"""Seals of what is saved, restored, served and taken up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.checks.audit.integrity import (
    digest_of_prompts,
    verify_model,
    verify_restored,
    verify_saved,
    write_model_digest,
)
from rlcore.checks.audit.unchanged import is_unchanged
from rlcore.errors import CheckpointError, StorageError
from rlcore.loop import train
from rlcore.models.loading import load_policy, save_model
from rlcore.training import checkpoint
from tests.rlcore.loop.conftest import KilledError, MakeComponents, Tape, make_components, start  # noqa: F401

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


def test_weights_that_were_saved_are_those_in_memory_also_when_they_were_rounded(
    start: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = load_policy(start, **CPU)
    save_model(model, start, tmp_path / "model")
    verify_saved(model.state_dict(), tmp_path / "model")
    half = {name: value.to(torch.bfloat16) for name, value in load_file(tmp_path / "model/model.safetensors").items()}
    save_file(half, tmp_path / "model/model.safetensors")
    verify_saved(model.state_dict(), tmp_path / "model")
    model.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(StorageError, match=r"1 of \d+ saved tensors differ from the trained ones"):
        verify_saved(model.state_dict(), tmp_path / "model")


def test_training_that_ends_with_the_weights_of_its_start_is_known_in_any_precision(
    start: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = load_policy(start, **CPU)
    model.to(torch.bfloat16)
    for name in ("start", "same", "wide", "other"):
        save_model(model, start, tmp_path / name / "model")
        model.to(torch.float32 if name == "same" else model.dtype)
        model.get_input_embeddings().weight.data.mul_(1.5 if name == "wide" else 1.0)
    before = {"start": None, **dict.fromkeys(("same", "wide", "other"), tmp_path / "start" / "model")}
    found = {
        name: write_model_digest(tmp_path / name, stage=name, model=tmp_path / name / "model", start=path)
        for name, path in before.items()
    }
    assert found == {"start": False, "same": True, "wide": True, "other": False}
    assert {name: is_unchanged(tmp_path / name) for name in (*found, "no artifact")} == found | {"no artifact": False}
    verify_model(tmp_path / "same", stage="same", model=tmp_path / "same" / "model")


def test_a_learner_that_saves_the_start_in_place_of_itself_is_found(
    make_components: MakeComponents,  # noqa: F811
    start: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    components = make_components(config={"num_iterations": 1})
    train(components, Tape())
    components.learner.save_model(start, tmp_path / "trained")
    first = load_policy(start, **CPU)
    monkeypatch.setattr(
        "rlcore.training.local_learner.save_model", lambda policy, *rest, **more: save_model(first, *rest)
    )
    with pytest.raises(StorageError, match="differ from the trained ones"):
        components.learner.save_model(start, tmp_path / "again")


@pytest.mark.parametrize("lost", ["_restore_weights", "_restore_optimizer"])
def test_a_resume_that_restores_only_a_part_is_stopped_before_its_first_step(
    lost: str,
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=3))
    monkeypatch.setattr(checkpoint, lost, lambda *_: None)
    tape = Tape()
    with pytest.raises(CheckpointError, match="differ from the checkpoint after it was restored"):
        train(make_components(), tape)
    assert tape.rows == []


def test_a_tensor_that_is_missing_on_either_side_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "policy.safetensors")
    verify_restored({"policy": {"a": torch.ones(2)}}, tmp_path)
    with pytest.raises(CheckpointError, match="1 of 1 tensors of policy"):
        verify_restored({"policy": {"a": torch.ones(2), "b": torch.ones(1)}}, tmp_path)


def test_a_model_is_taken_up_as_what_it_was_sealed_as(start: Path, tmp_path: Path) -> None:  # noqa: F811
    model = load_policy(start, **CPU)
    save_model(model, start, tmp_path / "model")
    with pytest.raises(StorageError, match="digests of the model are unreadable"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    write_model_digest(tmp_path, stage="grpo", model=tmp_path / "model")
    verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    with pytest.raises(StorageError, match="stage is 'ppo'"):
        verify_model(tmp_path, stage="ppo", model=tmp_path / "model")
    template = tmp_path / "model/chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    template.write_text("Sir: " + text, encoding="utf-8")
    with pytest.raises(StorageError, match="tokenizer or chat template is"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    template.write_text(text, encoding="utf-8")
    model.get_input_embeddings().weight.data.mul_(1.5)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(StorageError, match="weights is"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")


def test_prompts_have_a_digest_of_ids_tokens_references_and_order(make_components: MakeComponents) -> None:  # noqa: F811
    prompts = list(make_components().prompts)
    assert digest_of_prompts(prompts) != digest_of_prompts(prompts[::-1])
    assert digest_of_prompts(prompts) == digest_of_prompts(tuple(prompts))
