"""Tokenizer files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.text.chat_template import TEMPLATE_FIX

_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "spiece.model", "*.bpe.model", "vocab.*", "*.tiktoken")


def load_backend(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        ModelError: Missing or damaged tokenizer, or missing chat template.
    """
    require_vocabulary(folder)
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(
            f"the tokenizer cannot be loaded: {error}",
            where=str(folder),
            fix="the folder must hold tokenizer.json and tokenizer_config.json next to the weights",
        ) from error
    if not backend.chat_template:
        absent = [name for name in ("chat_template.jinja", "tokenizer_config.json") if not (folder / name).is_file()]
        without = f": the folder has no {' and no '.join(absent)}" if absent else ""
        raise ModelError(f"the tokenizer has no chat template{without}", where=str(folder), fix=TEMPLATE_FIX)
    return backend


def require_vocabulary(folder: Path) -> None:
    """Check that a folder has a tokenizer file; libraries would silently create an empty tokenizer.

    Raises:
        ModelError: No file of a tokenizer.
    """
    if not any(list(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ModelError(
            "the model's folder has no tokenizer.json",
            where=str(folder),
            fix="copy tokenizer.json and tokenizer_config.json from the source of the weights",
        )


def read_eos_ids(folder: Path, backend: PreTrainedTokenizerBase, *, optional: bool = False) -> tuple[int, ...]:
    """Return all EOS ids: those of the generation configuration (else of the model's), then the tokenizer's.

    Raises:
        ModelError: There is none, and ``optional`` is False.
    """
    declared = _read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(folder / "config.json").get("eos_token_id")
    ids = [*(declared if isinstance(declared, list) else [declared]), backend.eos_token_id]
    known = [number for number in ids if number is not None]
    if not all(type(number) is int and 0 <= number < len(backend) for number in known):
        raise ModelError(
            f"eos_token_id must be token ids, got {known}",
            where=str(folder / "generation_config.json"),
            fix=f"use whole numbers from 0 to {len(backend) - 1}, the tokens of the tokenizer",
        )
    unique = tuple(dict.fromkeys(known))
    if not unique and not optional:
        raise ModelError(
            "tokenizer has no EOS token",
            where=str(folder / "generation_config.json"),
            fix="set model.extra_eos to the control token that ends a turn",
        )
    return unique


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"the file is not valid JSON: {error}", where=str(path)) from error
    return document
