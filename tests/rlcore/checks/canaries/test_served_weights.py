"""Verification that an engine serves a model's files, also with a tied head or parts that cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.errors import StorageError
from rlcore.hardware.runtime import Runtime
from rlcore.models.loading import load_policy, save_model
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt
from tests.rlcore.loop.conftest import start  # noqa: F401

RUNTIME = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
HEAD = "lm_head.weight"


class Hides(NativeSampler):
    """An engine whose layer 0 can never be compared."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return sorted({*super().differing_parts(state), "layer 0"})


class HasAHead(NativeSampler):
    """An engine that reports a tied head as a matrix of its own."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return [] if HEAD in state else ["head"]


class HasNone(NativeSampler):
    """An engine whose tied head is its embedding."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return ["head"] if HEAD in state else []


def engine_of(kind: type[NativeSampler], folder: Path) -> NativeSampler:
    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    return kind(model, ChatTokenizer.load(folder))


def prompts_for(folder: Path) -> list[Prompt]:
    tokenizer = ChatTokenizer.load(folder)
    turns = [(Message(role="user", content=text),) for text in ("3+4", "12-5", "1")]
    return [
        Prompt(prompt_id=str(n), messages=turn, token_ids=tokenizer.render_prompt(turn), reference="", task="")
        for n, turn in enumerate(turns)
    ]


def changed(folder: Path, made: Path, name: str) -> Path:
    """A copy of a model in which the tensors of that name are larger by half."""
    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if name in key:
                tensor *= 1.5
    save_model(model, folder, made)
    return made


@pytest.mark.parametrize("kind", [NativeSampler, Hides, HasAHead, HasNone])
def test_an_engine_that_serves_the_model_passes(start: Path, kind: type[NativeSampler]) -> None:  # noqa: F811
    verify_served_weights(engine_of(kind, start), start, prompts_for(start), RUNTIME, seed=0)


@pytest.mark.parametrize("kind", [NativeSampler, Hides])
@pytest.mark.parametrize("name", ["embed", "layers.0.", ""])
def test_an_engine_of_another_model_is_found(
    start: Path,  # noqa: F811
    tmp_path: Path,
    kind: type[NativeSampler],
    name: str,
) -> None:
    other = changed(start, tmp_path / "other", name)
    with pytest.raises(StorageError, match="the engine serves other weights than the model's in"):
        verify_served_weights(engine_of(kind, start), other, prompts_for(start), RUNTIME, seed=0)


def test_where_no_part_agrees_log_probabilities_are_not_asked(start: Path, tmp_path: Path) -> None:  # noqa: F811
    """They could not tell a policy from the one that it was trained from where the precision is coarse."""
    other = changed(start, tmp_path / "other", "")
    with pytest.raises(StorageError, match="no module is equal"):
        verify_served_weights(engine_of(NativeSampler, start), other, prompts_for(start), RUNTIME, seed=0)
