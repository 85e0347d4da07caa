"""Import of a starting model from any source, as a checkpoint folder that is verified by reading it back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlcore.config.data import ModelConfig, tried
from rlcore.errors import ModelError
from rlcore.extras import install_command
from rlcore.models.architectures import max_positions
from rlcore.models.files import find_package_file
from rlcore.models.loading import from_pretrained, load_policy, no_progress_bars
from rlcore.models.logprob_check import check_model
from rlcore.models.model_validation import read_config, require_rows, require_template_ends, validate_model_dir
from rlcore.models.saving import atomic_folder, weights_digest
from rlcore.models.scratch import make_model, make_tokenizer
from rlcore.text.chat_template import record_date, recorded_date, writes_date
from rlcore.text.text_parts import control_tokens_of
from rlcore.text.tokenization import ChatTokenizer, read_eos_ids, require_vocabulary

CARD = "model_card.json"
_SHOWN = 12
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Description of a starting checkpoint.

    Attributes:
        max_positions: In tokens; 0 if unbounded.
        tied_embeddings: Head and embedding are one tensor.
        template_date: Date that the template writes; empty if none.
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
    template_date: str
    weights_sha256: str


def import_model(config: ModelConfig, folder: Path | str, *, seed: int) -> CheckpointInfo:
    """Write the configured starting model as a checkpoint folder, and verify it by reading it back.

    ``seed``: of weights from scratch.

    Raises:
        ModelError: Unknown or unreachable model, damaged file, missing tokenizer or chat template.
        StorageError: ``folder`` exists or cannot be written.
    """
    with no_progress_bars(), atomic_folder(Path(folder)) as temporary:
        model, backend = _read_source(config, seed=seed)
        configure_tokenizer(backend, config)
        _write(model, backend, temporary, extra_eos=config.extra_eos)
        tokenizer = load_tokenizer(temporary)
        _verify(temporary, model, tokenizer)
        card = _card(config, model, tokenizer, weights_sha256=weights_digest(temporary))
        (temporary / CARD).write_text(json.dumps(dataclasses.asdict(card), indent=1) + "\n", encoding="utf-8")
    return card


def _read_source(config: ModelConfig, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    match config.source:
        case "scratch":
            backend = make_tokenizer(max_positions=config.shape.max_positions)
            return make_model(config.shape, backend, seed=seed), backend
        case "gguf":
            return _read_gguf(Path(config.path))
        case "package":
            return _read_gguf(find_package_file(config.path, config.file))
        case "folder":
            return _read_folder(Path(config.path))
        case "hub":
            return _read_hub(config.path, config.revision)
        case "registry":
            raise ModelError(
                "a registered model must be downloaded before it is imported",
                where="model.source",
                fix="download it, then import it with source = 'folder'",
            )


def _read_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        raise ModelError(
            "the folder has no model: config.json is missing",
            where=tried(str(folder)),
            fix="correct model.path",
        )
    require_vocabulary(folder)
    model = from_pretrained(folder, dtype="auto", config=validate_model_dir(folder), local_files_only=True)
    return model, read_tokenizer(folder, local_files_only=True)


def _read_hub(name: str, revision: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not _COMMIT.fullmatch(revision):
        raise ModelError(
            f"revision {revision!r} of {name!r} is not a commit",
            where="model.revision",
            fix="use the 40 hexadecimal digits of a commit, because branches and tags can move",
        )
    config = read_config(name, revision=revision)
    model = from_pretrained(name, dtype="auto", config=config, revision=revision)
    return model, read_tokenizer(name, revision=revision)


def read_tokenizer(name: Path | str, **options: str | bool) -> PreTrainedTokenizerBase:
    """Read a tokenizer, or raise a ModelError."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"the model has no usable tokenizer: {error}", where=str(name)) from error


def _write(model: PreTrainedModel, backend: PreTrainedTokenizerBase, folder: Path, *, extra_eos: Sequence[str]) -> None:
    # A new one: the model's own may set top-p or top-k, and engines would then sample a filtered distribution.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    model.save_pretrained(folder)
    write_tokenizer(backend, folder, extra_eos=extra_eos)


@torch.no_grad()
def _verify(folder: Path, model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
    copy = load_policy(folder, device=torch.device("cpu"), dtype=model.dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    require_rows(tokenizer, rows, where=str(folder))
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


def _card(
    config: ModelConfig, model: PreTrainedModel, tokenizer: ChatTokenizer, *, weights_sha256: str
) -> CheckpointInfo:
    template = str(tokenizer.hf_tokenizer.get_chat_template())
    return CheckpointInfo(
        source=config.source,
        path=config.without_folders.path,
        revision=config.revision,
        file=config.file,
        licence=config.license,
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary_size=model.get_input_embeddings().weight.shape[0],
        max_positions=max_positions(model.config) or 0,
        dtype=str(model.dtype).removeprefix("torch."),
        tied_embeddings=_is_tied(model),
        eos_ids=tokenizer.eos_ids,
        template_date=day.isoformat() if (day := recorded_date(tokenizer.hf_tokenizer)) else "",
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
        weights_sha256=weights_sha256,
    )


def _read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, with bfloat16 weights, and the tokenizer of a GGUF file."""
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
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    return plain.to(torch.bfloat16)


def configure_tokenizer(backend: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Give a loaded tokenizer a preset's template, defaults and date.

    Raises:
        ModelError: A template that does not end, is missing, or does not use what is set.
    """
    if config.chat_template:
        backend.chat_template = _read_template(Path(config.chat_template))
    elif isinstance(backend.chat_template, dict):  # named templates: use the default one
        backend.chat_template = backend.get_chat_template()
    if config.chat_template_kwargs:
        backend.chat_template = _with_defaults(backend.chat_template or "", config.chat_template_kwargs)
    if config.source != "scratch":
        require_template_ends(backend)
    _pin_date(backend, config.template_date)


def write_tokenizer(backend: PreTrainedTokenizerBase, folder: Path, *, extra_eos: Sequence[str]) -> None:
    """Write the tokenizer and all EOS ids next to a model's configuration.

    Raises:
        ModelError: No EOS token, or an ordinary token in its place.
    """
    backend.save_pretrained(folder)
    extra = [_control_token(backend, text) for text in extra_eos]
    eos_ids = list(dict.fromkeys([*extra, *read_eos_ids(folder, backend, optional=bool(extra))]))
    ids = {"eos_token_id": eos_ids, "pad_token_id": backend.pad_token_id}
    GenerationConfig(**ids, bos_token_id=backend.bos_token_id).save_pretrained(folder)


def _with_defaults(template: str, arguments: Mapping[str, str | int | float | bool]) -> str:
    """Return a chat template with other defaults of its variables; renderers may still override them."""
    lines = []
    for name, value in arguments.items():
        if not re.search(rf"\b{name}\b", template):
            raise ModelError(
                f"the chat template does not use {name!r}",
                where=f"model.chat_template_kwargs.{name}",
                fix="use a variable of the model's chat template",
            )
        literal = str(value).lower() if isinstance(value, bool) else ascii(value)
        lines.append(f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif -%}}\n")
    return "".join(lines) + template


def _pin_date(backend: PreTrainedTokenizerBase, day: str) -> None:
    """Record the date of a template that writes one: ``day``, else the recorded date, else today."""
    if writes_date(str(backend.chat_template)):
        record_date(backend, date.fromisoformat(day) if day else recorded_date(backend) or date.today())
    elif day:
        raise ModelError("the chat template writes no date", where="model.template_date", fix="remove the key")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read: {error}", where=tried(str(path))) from error


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load the tokenizer of an external checkpoint.

    Raises:
        ModelError: The tokenizer or its chat template raised any exception.
    """
    try:
        return ChatTokenizer.load(folder)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the model's tokenizer cannot be used: {type(error).__name__}: {error}") from error


def _control_token(backend: PreTrainedTokenizerBase, text: str) -> int:
    """Return the id of a text that is a single control token, which user text cannot contain."""
    known = control_tokens_of(backend)
    if text in known:
        return known[text]
    ids = backend(text, add_special_tokens=False).input_ids
    what = "an ordinary token, which any text may contain" if len(ids) == 1 else f"{len(ids)} tokens of this tokenizer"
    raise ModelError(
        f"{text!r} cannot end a completion: it is {what}",
        where="model.extra_eos",
        fix=f"use control tokens; the tokenizer has {', '.join(sorted(known)[:_SHOWN]) or 'none'}",
    )
