"""Export of a trained checkpoint to a standard model folder: one precision, merged adapters, EOS ids."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from rlcore.errors import ModelError, StorageError
from rlcore.models.heads import HEAD_FILE
from rlcore.models.loading import GENERATION_CONFIG, TOKENIZER_FILES
from rlcore.models.saving import atomic_folder, cast_weights

ExportDtype = Literal["keep", "float32", "bfloat16", "float16"]
README = "README.md"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def export_checkpoint(checkpoint: Path, folder: Path, *, dtype: ExportDtype = "keep", readme: str = "") -> None:
    """Write weights, configuration, tokenizer, chat template and EOS ids of a policy to a new ``folder``.

    A trained adapter is already merged, and not exported. ``readme``: model card.

    Raises:
        ModelError: The checkpoint is not a language model, or a weight overflows in ``dtype``.
        StorageError: ``folder`` is not empty, or cannot be written; nothing is left behind.
    """
    _refuse_others(checkpoint)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise StorageError("the folder is not empty", where=str(folder), fix="choose another folder, or empty it")
    with atomic_folder(folder) as temporary:
        for path in _files(checkpoint):
            shutil.copyfile(path, temporary / path.name)
        if dtype != "keep":
            _cast(temporary, dtype)
        if readme:
            (temporary / README).write_text(readme, encoding="utf-8")


def _refuse_others(checkpoint: Path) -> None:
    if (checkpoint / HEAD_FILE).is_file():
        raise ModelError(
            "this is a reward model, which other libraries cannot load",
            where=str(checkpoint),
            fix="export a policy, or load it with rlcore.models.reward_ensemble",
        )
    missing = [
        name for name in ("config.json", GENERATION_CONFIG, "tokenizer.json") if not (checkpoint / name).is_file()
    ]
    if missing:
        raise ModelError(f"the checkpoint has no {missing[0]}", where=str(checkpoint), fix="choose another version")


def _files(checkpoint: Path) -> list[Path]:
    named = [checkpoint / name for name in ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES)]
    weights = [path for pattern in _WEIGHTS for path in sorted(checkpoint.glob(pattern))]
    return [path for path in (*named, *weights) if path.is_file()]


def _cast(folder: Path, dtype: str) -> None:
    target: torch.dtype = getattr(torch, dtype)
    cast_weights(folder, lambda _, value: target if value.is_floating_point() else value.dtype, dtype=dtype)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if not bool(file.get_tensor(name).isfinite().all()):
                    raise ModelError(
                        f"the weight {name} is not finite in {dtype}", where=path.name, fix="export in bfloat16"
                    )
