"""Checkpoints in and out: a starting model from any source as a verified folder, a policy from a folder, and back.

A checkpoint folder holds config.json, generation_config.json (the EOS ids and nothing that filters a distribution),
safetensors, the tokenizer with its chat template, and model_card.json where it was imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlcore.config import ModelConfig
from rlcore.config.data import tried
from rlcore.errors import ModelError
from rlcore.models.architectures import max_positions
from rlcore.models.batches import choose_attention
from rlcore.models.check import check_model
from rlcore.models.gguf import find_package_file, read_gguf
from rlcore.models.saving import files_digest, narrow_like, new_folder, weights_digest
from rlcore.models.scratch import make_model, make_tokenizer
from rlcore.models.starting_model import look_at, read_config, require_template_ends
from rlcore.models.starting_tokenizer import control_token, load_tokenizer, read_template, with_arguments
from rlcore.tokenization import ChatTokenizer, read_eos_ids, require_vocabulary

CARD = "model_card.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a starting checkpoint is and where it came from. Digests are SHA-256, of the template's text and of the
    safetensors bytes; ``tied_embeddings``: the head is the embedding's own tensor; ``max_positions``: 0 is no bound.
    """

    source: str
    path: str
    revision: str
    file: str
    licence: str
    architecture: str
    num_parameters: int
    vocabulary_size: int
    max_positions: int
    dtype: str
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    chat_template_sha256: str
    weights_sha256: str


def import_model(config: ModelConfig, folder: Path, *, seed: int) -> ModelCard:
    """Write the configured starting model as a checkpoint folder, proved by reading it back.

    ``seed`` decides the weights of a model from scratch; other sources do not use it.

    Raises:
        ModelError: unknown or unreachable model, damaged file, missing tokenizer or chat template.
        StorageError: ``folder`` exists or the disk refuses.
    """
    with _no_progress_bars(), new_folder(folder) as temporary:
        model, backend = _read_source(config, seed=seed)
        if config.chat_template:
            backend.chat_template = read_template(Path(config.chat_template))
        elif isinstance(backend.chat_template, dict):  # several by name: the one for plain conversations
            backend.chat_template = backend.get_chat_template()
        if config.template_arguments:
            backend.chat_template = with_arguments(backend.chat_template or "", config.template_arguments)
        if config.source != "scratch":
            require_template_ends(backend)
        _write(model, backend, temporary, extra_eos=config.extra_eos)
        tokenizer = load_tokenizer(temporary)
        _verify(temporary, model, tokenizer)
        card = _card(config, model, tokenizer, weights_sha256=weights_digest(temporary))
        (temporary / CARD).write_text(json.dumps(dataclasses.asdict(card), indent=1) + "\n", encoding="utf-8")
    return card


def source_digest(config: ModelConfig) -> str:
    """SHA-256 of the local files that a checkpoint would be made from; empty where the configuration says it all.

    Raises:
        ModelError: a file is missing.
    """
    files = [Path(config.chat_template)] if config.chat_template else []
    if config.source == "package":
        files.append(find_package_file(config.path, config.file))
    elif config.source == "gguf":
        files.append(Path(config.path))
    elif config.source == "folder":
        files += sorted(path for path in Path(config.path).glob("*") if path.is_file())
    try:
        return files_digest(files) if files else ""
    except OSError as error:
        raise ModelError(f"a file of the model cannot be read: {error}", where=str(error.filename)) from error


def load_policy(folder: Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a checkpoint folder, in evaluation mode (no dropout), without a cache by default.

    Raises:
        ModelError: missing, damaged or incomplete files, unknown architecture.
    """
    with _no_progress_bars():
        model = _from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.config.use_cache = False
    choose_attention(model)
    return model.to(device).eval()


def save_model(
    model: PreTrainedModel,
    tokenizer_folder: Path,
    folder: Path,
    *,
    like_start: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a trained model with the tokenizer and the EOS ids of the checkpoint that it came from.

    ``like_start``: weights that are in half precision there are rounded to it; else they stay as they learned.
    ``state``: all of the weights, where the model holds but a part of them.

    Raises:
        ModelError: ``tokenizer_folder`` is not a checkpoint.
        StorageError: ``folder`` exists or the disk refuses; nothing is left behind.
    """
    with _no_progress_bars(), new_folder(folder) as temporary:
        model.save_pretrained(temporary, **({} if state is None else {"state_dict": dict(state)}))
        if like_start:
            narrow_like(temporary, tokenizer_folder)
        for name in (GENERATION_CONFIG, *TOKENIZER_FILES):
            source = tokenizer_folder / name
            if source.is_file():
                shutil.copyfile(source, temporary / name)
            elif name in (GENERATION_CONFIG, "tokenizer.json"):
                raise ModelError(f"the checkpoint has no {name}", where=str(tokenizer_folder))


def _read_source(config: ModelConfig, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    match config.source:
        case "scratch":
            backend = make_tokenizer(max_positions=config.shape.max_positions)
            return make_model(config.shape, backend, seed=seed), backend
        case "gguf":
            return read_gguf(Path(config.path))
        case "package":
            return read_gguf(find_package_file(config.path, config.file))
        case "folder":
            return _read_folder(Path(config.path))
        case "hub":
            return _read_hub(config.path, config.revision)
        case "registry":
            raise ModelError(
                "a model of the registry must be downloaded before it is imported",
                where="model.source",
                fix="download it, then import it with source = 'folder'",
            )


def _read_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        raise ModelError(
            "there is no model in this folder: config.json is missing",
            where=tried(str(folder)),
            fix="correct model.path",
        )
    require_vocabulary(folder)
    model = _from_pretrained(folder, dtype="auto", config=look_at(folder), local_files_only=True)
    return model, _read_tokenizer(folder, local_files_only=True)


def _read_hub(name: str, revision: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not _COMMIT.fullmatch(revision):
        raise ModelError(
            f"revision {revision!r} of {name!r} is not a commit",
            where="model.revision",
            fix="name the 40 hexadecimal digits of a commit: branches and tags can be moved",
        )
    config = read_config(name, revision=revision)
    model = _from_pretrained(name, dtype="auto", config=config, revision=revision)
    return model, _read_tokenizer(name, revision=revision)


def _read_tokenizer(name: Path | str, **options: str | bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"the model has no usable tokenizer: {error}", where=str(name)) from error


def _from_pretrained(name: Path | str, *, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # whatever it is that the files do to their reader
        raise ModelError(
            f"the model cannot be loaded: {error}",
            where=_damaged_file(name) or str(name),
            fix="check the name and the files; without a network use a folder, a GGUF or a package as model.source",
        ) from error
    faults = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if faults:  # transformers would go on with random numbers in their place
        raise ModelError(f"the weights are incomplete: {faults}", where=str(name), fix="fetch the checkpoint again")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError("quantized weights cannot be trained", where=str(name), fix="name the unquantized model")
    return model


def _damaged_file(name: Path | str) -> str:
    """The first weight file of a local folder that cannot be read, or nothing."""
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                continue
        except (SafetensorError, OSError):
            return str(path)
    return ""


def _write(model: PreTrainedModel, backend: PreTrainedTokenizerBase, folder: Path, *, extra_eos: Sequence[str]) -> None:
    model.save_pretrained(folder)
    backend.save_pretrained(folder)
    extra = [control_token(backend, text) for text in extra_eos]
    eos_ids = list(dict.fromkeys([*extra, *read_eos_ids(folder, backend, optional=bool(extra))]))
    ids = {"eos_token_id": eos_ids, "pad_token_id": backend.pad_token_id}
    # Fresh, because a model's own may ask for top-p or top-k, and an engine would then sample a filtered distribution.
    GenerationConfig(**ids, bos_token_id=backend.bos_token_id).save_pretrained(folder)


@torch.no_grad()
def _verify(folder: Path, model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
    """Raises ModelError unless the folder gives the same weights back and they compute what the library does."""
    copy = load_policy(folder, device=torch.device("cpu"), dtype=model.dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary_size > rows:
        raise ModelError(f"the tokenizer has {tokenizer.vocabulary_size} tokens, the model {rows}", where=str(folder))
    if not bool(copy(torch.tensor([tokenizer.encode("3 + 4 = 7")])).logits.isfinite().all()):
        raise ModelError("the model computes NaN or infinity", where=str(folder), fix="fetch the model again")
    check_model(copy, tokenizer)
    expected, found = model.state_dict(), copy.state_dict()
    problems = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    if _is_tied(model) != _is_tied(copy):
        problems.append("tied embeddings")
    if problems:
        raise ModelError(f"the checkpoint differs from what was written: {problems[:5]}", where=str(folder))


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _card(config: ModelConfig, model: PreTrainedModel, tokenizer: ChatTokenizer, *, weights_sha256: str) -> ModelCard:
    template = str(tokenizer.backend.get_chat_template())
    return ModelCard(
        source=config.source,
        path=config.path,
        revision=config.revision,
        file=config.file,
        licence=config.licence,
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary_size=model.get_input_embeddings().weight.shape[0],
        max_positions=max_positions(model.config) or 0,
        dtype=str(model.dtype).removeprefix("torch."),
        tied_embeddings=_is_tied(model),
        eos_ids=tokenizer.eos_ids,
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
        weights_sha256=weights_sha256,
    )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
