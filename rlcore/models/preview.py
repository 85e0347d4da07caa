"""Configuration and tokenizer of a starting model before its import. No weight is loaded, nothing is downloaded."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.hardware.memory_plan import ModelSize
from rlcore.models.files import find_package_file
from rlcore.models.importing import configure_tokenizer, load_tokenizer, read_tokenizer, write_tokenizer
from rlcore.models.lora import linear_names
from rlcore.models.model_validation import empty_model, read_config, require_files, require_rows, require_weights
from rlcore.models.scratch import make_config, make_tokenizer
from rlcore.text.tokenization import ChatTokenizer, require_vocabulary

_GENERATION = "generation_config.json"


def preview_config(model: ModelConfig) -> PretrainedConfig | None:
    """Return the configuration of a model that is on this machine; None if it must be fetched.

    Raises:
        ModelError: It cannot be read, or lacks files.
    """
    if model.source == "scratch":
        return make_config(model.shape, make_tokenizer(max_positions=model.shape.max_positions))
    if model.source == "folder":
        require_files(Path(model.path))
        config = read_config(Path(model.path), local_files_only=True)
        require_weights(config, Path(model.path))
        return config
    if (file := _gguf(model)) is None:
        return None
    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except ImportError:  # of a missing extra, which the preset's checks name
        return None
    except Exception as error:  # damaged files raise any exception
        raise ModelError(
            f"the GGUF file cannot be read: {error}", where=str(file), fix="fetch it again, or name another file"
        ) from error


def preview_tokenizer(model: ModelConfig) -> ChatTokenizer | None:
    """Return the tokenizer that the import would store; None if it is not on this machine.

    Raises:
        ModelError: No tokenizer, chat template or EOS token, or a template that cannot be trained with.
    """
    config = preview_config(model) if model.source != "scratch" else None
    if config is None:
        return None
    folder, file = Path(model.path), _gguf(model)
    if file is None:
        require_vocabulary(folder)
    gguf = {"gguf_file": file.name} if file else {}
    backend = read_tokenizer(file.parent if file else folder, local_files_only=True, **gguf)
    configure_tokenizer(backend, model)
    with tempfile.TemporaryDirectory(prefix="rlcore-preview-") as name:
        config.save_pretrained(name)
        if file is None and (folder / _GENERATION).is_file():
            shutil.copy(folder / _GENERATION, name)
        try:
            write_tokenizer(backend, Path(name), extra_eos=model.extra_eos)
            tokenizer = load_tokenizer(Path(name))
            require_rows(tokenizer, config.get_text_config().vocab_size, where=model.path)
            return tokenizer
        except ModelError as error:
            where = error.where.replace(name, model.path)
            raise ModelError(error.what, where=where or model.path, fix=error.fix) from error


def _gguf(model: ModelConfig) -> Path | None:
    if model.source == "package":
        return find_package_file(model.path, model.file)
    return Path(model.path) if model.source == "gguf" else None


def model_size(config: PretrainedConfig) -> ModelSize:
    """Return the size of a model from its configuration.

    Raises:
        ModelError: It describes no causal language model.
    """
    model = empty_model(config)
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [(path, m) for path, m in model.base_model.named_modules() if isinstance(m, nn.Linear)]
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        keys=width * (getattr(config, "num_key_value_heads", None) or heads),
        feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        linear=tuple((path.rpartition(".")[2], m.in_features, m.out_features) for path, m in layers),
        adaptable=frozenset(linear_names(model)),
    )
