"""GGUF files (llama.cpp), unpacked to float weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlcore.errors import ModelError
from rlcore.extras import install_command


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, with bfloat16 weights, and the tokenizer of a GGUF file.

    Raises:
        ModelError: Missing or damaged file, architecture that transformers cannot read, or missing reader package.
    """
    if not path.is_file():
        raise ModelError("no such file", where=str(path), fix="correct model.path")
    try:
        import accelerate  # noqa: F401 - transformers reads the file with both
        import gguf  # noqa: F401

        packed = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True, **_unpacking()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as error:
        raise ModelError(
            f"GGUF files need more packages: {error}", where=str(path), fix=install_command("gguf")
        ) from error
    except Exception as error:  # damaged files raise any exception, including struct.error
        raise ModelError(
            f"the GGUF file cannot be read: {error}",
            where=str(path),
            fix="the file is damaged or not a GGUF of a supported architecture: fetch it again",
        ) from error
    return _plain_copy(packed), tokenizer


def _unpacking() -> dict[str, object]:
    # Newer releases of transformers keep blocks packed if they have a kernel for them.
    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _plain_copy(packed: PreTrainedModel) -> PreTrainedModel:
    """Copy the weights to a model that is not marked as quantized, since a marked one cannot be saved."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    return plain.to(torch.bfloat16)
