"""Loading, saving and export of checkpoint folders.

A checkpoint folder holds config.json, generation_config.json (EOS ids, no sampling filters), safetensors, the tokenizer
with its chat template, and, if imported, model_card.json.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlcore.errors import ModelError, StorageError
from rlcore.models.architectures import choose_kernels
from rlcore.models.model_validation import refuse_unknown_weights
from rlcore.models.saving import HEAD_FILE, atomic_folder, cast_like, cast_weights

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_policy(folder: Path | str, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model in evaluation mode (no dropout), without a cache by default.

    Raises:
        ModelError: Missing, damaged or incomplete files, or unknown architecture.
    """
    with no_progress_bars():
        model = from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.config.use_cache = False
    choose_kernels(model)
    return model.to(device).eval()


def save_model(
    model: PreTrainedModel,
    tokenizer_folder: Path | str,
    folder: Path | str,
    *,
    like_start: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a trained model to a new folder, with the tokenizer and EOS ids of its start, ``tokenizer_folder``.

    ``like_start``: round weights to half precision if they are so in ``tokenizer_folder``. ``state``: all weights, if
    ``model`` holds only shards of them.

    Raises:
        ModelError: ``tokenizer_folder`` is not a checkpoint.
        StorageError: ``folder`` exists or cannot be written; nothing is left behind.
    """
    tokenizer_folder = Path(tokenizer_folder)
    with no_progress_bars(), atomic_folder(Path(folder)) as temporary:
        model.save_pretrained(temporary, **({} if state is None else {"state_dict": dict(state)}))
        if like_start:
            cast_like(temporary, tokenizer_folder)
        for name in (GENERATION_CONFIG, *TOKENIZER_FILES):
            source = tokenizer_folder / name
            if source.is_file():
                shutil.copyfile(source, temporary / name)
            elif name in (GENERATION_CONFIG, "tokenizer.json"):
                raise ModelError(f"the checkpoint has no {name}", where=str(tokenizer_folder))


def from_pretrained(name: Path | str, *, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Load a causal language model of a transformers class from complete, unquantized safetensors.

    Raises:
        ModelError: The model cannot be reached or read, is incomplete, or is quantized.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # damaged files raise any exception
        raise ModelError(
            f"the model cannot be loaded: {error}",
            where=_damaged_file(name) or str(name),
            fix="check the name and the files; without a network use a folder, a GGUF or a package as model.source",
        ) from error
    errors = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if errors:  # transformers would fill them with random numbers
        raise ModelError(f"the weights are incomplete: {errors}", where=str(name), fix="fetch the checkpoint again")
    refuse_unknown_weights(model, map(str, report["unexpected_keys"]), where=str(name))
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError("quantized weights cannot be trained", where=str(name), fix="use the unquantized model")
    return model


def _damaged_file(name: Path | str) -> str:
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                continue
        except (SafetensorError, OSError):
            return str(path)
    return ""


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars within the context."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


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
