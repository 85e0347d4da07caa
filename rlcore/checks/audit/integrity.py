"""Seals: what is saved is what was trained, what is restored is what was saved, and what is used is what was sealed.

A stage that makes a model leaves ``seal.json`` beside it: whose it is, the digest of its weights, and what its
tokenizer makes of a short conversation. Whoever takes the model up compares all three with what it has in its hands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlcore.errors import CheckpointError, StorageError
from rlcore.models.saving import weights_digest
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt

SEAL = "seal.json"
_PROBE = (Message(role="user", content="3 + 4 = ?"), Message(role="assistant", content="7"))
_AGAIN = Message(role="user", content="And 5?")


def verify_saved(trained: Mapping[str, Tensor], folder: Path) -> None:
    """The weights in ``folder`` are these, rounded to the precision of the file, and no others.

    Raises:
        StorageError: names the tensors that are missing or differ.
    """
    missing, wrong = set(trained), list[str]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                held, kept = trained.get(name), stored.get_tensor(name)
                missing.discard(name)
                if held is None or not torch.equal(held.detach().cpu().to(kept.dtype), kept):
                    wrong.append(name)
    tied = {name for name in missing if any(trained[name] is trained[other] for other in set(trained) - missing)}
    pointers = {trained[name].data_ptr() for name in set(trained) - missing}
    absent = sorted(name for name in missing - tied if trained[name].data_ptr() not in pointers)
    if wrong or absent:
        shown = ", ".join([*wrong, *(f"{name} (missing)" for name in absent)][:4])
        raise StorageError(
            f"{len(wrong) + len(absent)} of {len(trained)} tensors that were saved are not those that were trained: "
            f"{shown}",
            where=str(folder),
            fix="nothing of this model is to be used; the run's checkpoints hold what was trained",
        )


def verify_restored(live: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """What a learner holds after a resume is what its checkpoint holds, bit for bit; ``live``: tensors by file.

    Raises:
        CheckpointError: names the file and the tensors that differ.
    """
    for file, tensors in live.items():
        with safe_open(folder / f"{file}.safetensors", framework="pt") as stored:
            names = set(stored.keys())
            wrong = [
                name
                for name in sorted(names | set(tensors))
                if name not in names
                or name not in tensors
                or not torch.equal(stored.get_tensor(name), tensors[name].detach().cpu())
            ]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} of {len(names)} tensors of {file} are not those of the checkpoint after it was "
                f"restored: {', '.join(wrong[:4])}",
                where=str(folder),
                fix="the run must not go on from here; report it with the versions of torch and of this library",
            )


def fingerprint(tokenizer: ChatTokenizer) -> str:
    """What a tokenizer and its template make of a short conversation, with the ids that end a turn, as a digest."""
    told = [tokenizer.render_prompt([_PROBE[0]]), tokenizer.render_prompt([*_PROBE, _AGAIN]), tokenizer.end_of_turn]
    return hashlib.sha256(json.dumps([told, tokenizer.eos_ids]).encode()).hexdigest()


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """A digest of prompts in their order: ids, tokens and references."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.token_ids, prompt.reference]).encode())
    return digest.hexdigest()


def write_model_digest(folder: Path, *, stage: str, model: Path) -> None:
    """Seal the model of a stage; ``model``: its checkpoint below ``folder``."""
    seal = {"stage": stage, "weights": weights_digest(model), "tokens": fingerprint(ChatTokenizer.load(model))}
    (folder / SEAL).write_text(json.dumps(seal, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def verify_model(folder: Path, *, stage: str, model: Path) -> ChatTokenizer:
    """The tokenizer of a model that is taken up as that of ``stage``, and is the one that was sealed in ``folder``.

    Raises:
        StorageError: another stage's, other weights, or another tokenizer or template; or there is no seal.
    """
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        kept = {name: str(seal[name]) for name in ("stage", "weights", "tokens")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the model has no seal that can be read: {error}", where=str(folder / SEAL), fix="run its stage again"
        ) from error
    tokenizer = ChatTokenizer.load(model)
    found = {"stage": stage, "weights": weights_digest(model), "tokens": fingerprint(tokenizer)}
    said = {"stage": "stage", "weights": "weights", "tokens": "tokenizer or chat template"}
    differing = [name for name in kept if kept[name] != found[name]]
    if differing:
        name = differing[0]
        raise StorageError(
            f"the model is not the one that was sealed: its {said[name]} is {found[name][:40]!r}, the seal says "
            f"{kept[name][:40]!r}",
            where=str(folder),
            fix="run the stage that made it again; a preset must not change the template between training and use",
        )
    return tokenizer
