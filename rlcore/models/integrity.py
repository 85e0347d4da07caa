"""Integrity of weights: trained weights are saved, saved weights are restored, and only verified models are used.

``seal.json`` next to a model has its stage, the digest of the weights, and one of the tokenizer's output on a short
conversation. Each use of the model verifies all three.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlcore.errors import CheckpointError, StorageError
from rlcore.models.files import SEAL
from rlcore.models.saving import weights_digest
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt

_PROBE = (Message(role="user", content="3 + 4 = ?"), Message(role="assistant", content="7"))
_AGAIN = Message(role="user", content="And 5?")


def verify_saved(trained: Mapping[str, Tensor], folder: Path) -> None:
    """Verify that ``folder`` has exactly these weights, rounded to the precision of the file.

    Raises:
        StorageError: Names the tensors that are missing or differ.
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
            f"{len(wrong) + len(absent)} of {len(trained)} saved tensors differ from the trained ones: {shown}",
            where=str(folder),
            fix="do not use this model; the checkpoints of the run have the trained weights",
        )


def verify_restored(live: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Verify that the learner's tensors equal those of its checkpoint, bit for bit; ``live``: tensors by file.

    Raises:
        CheckpointError: Names the file and the tensors that differ.
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
                f"{len(wrong)} of {len(names)} tensors of {file} differ from the checkpoint after it was restored: "
                f"{', '.join(wrong[:4])}",
                where=str(folder),
                fix="do not continue this run; report it with the versions of torch and of this library",
            )


def fingerprint(tokenizer: ChatTokenizer) -> str:
    """Return a digest of the tokenizer's and template's output on a short conversation, and of the EOS ids."""
    output = [tokenizer.render_prompt([_PROBE[0]]), tokenizer.render_prompt([*_PROBE, _AGAIN]), tokenizer.end_of_turn]
    return hashlib.sha256(json.dumps([output, tokenizer.eos_ids]).encode()).hexdigest()


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """Return a digest of prompts in their order: ids, tokens and reference answers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.token_ids, prompt.reference]).encode())
    return digest.hexdigest()


def write_model_digest(folder: Path, *, stage: str, model: Path, start: Path | None = None) -> bool:
    """Write the digests of a stage's model, and return True if it has the weights of ``start``, in any precision.

    ``model``: its checkpoint below ``folder``.
    """
    seal = {"stage": stage, "weights": weights_digest(model), "tokens": fingerprint(ChatTokenizer.load(model))}
    unchanged = start is not None and _have_equal_values(model, start)
    text = json.dumps(seal | {"unchanged": unchanged}, indent=1, sort_keys=True)
    (folder / SEAL).write_text(text + "\n", encoding="utf-8")
    return unchanged


def _have_equal_values(model: Path, start: Path) -> bool:
    """Return True if all weights that two checkpoints name are equal; a tied weight may be in one alone."""
    with ExitStack() as stack:
        one, other = (_tensors(folder, stack) for folder in (model, start))
        common = one.keys() & other.keys()
        return all(torch.equal(one[name]().float(), other[name]().float()) for name in common)


def _tensors(folder: Path, stack: ExitStack) -> dict[str, Callable[[], Tensor]]:
    files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
    return {name: partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


def verify_model(folder: Path, *, stage: str, model: Path) -> ChatTokenizer:
    """Verify a model against the digests in ``folder``, and return its tokenizer.

    Raises:
        StorageError: Another stage, other weights, or another tokenizer or template; or the digests are missing.
    """
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        kept = {name: str(seal[name]) for name in ("stage", "weights", "tokens")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the digests of the model are unreadable: {error}", where=str(folder / SEAL), fix="rerun its stage"
        ) from error
    tokenizer = ChatTokenizer.load(model)
    found = {"stage": stage, "weights": weights_digest(model), "tokens": fingerprint(tokenizer)}
    labels = {"stage": "stage", "weights": "weights", "tokens": "tokenizer or chat template"}
    differing = [name for name in kept if kept[name] != found[name]]
    if differing:
        name = differing[0]
        raise StorageError(
            f"the model was changed after its stage: {labels[name]} is {found[name][:40]!r}, expected "
            f"{kept[name][:40]!r}",
            where=str(folder),
            fix="rerun its stage; a preset must not change the template between training and use",
        )
    return tokenizer
