"""Checks of a folder's weights by the headers of its safetensors files. No weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlcore.errors import ModelError

MAX_TENSORS = 100_000
AGAIN = "fetch the checkpoint again, with the configuration that it was saved with"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SPARE = 2.0  # maximum ratio of model parameters to stored numbers: tied weights are stored once
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_POINTER = b"version https://git-lfs"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Shape and type of a tensor in a safetensors file."""

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
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    refuse_unknown_weights(empty, stored, where=str(folder))
    _refuse_other_shapes(empty, stored, folder)
    numbers = sum(math.prod(each.shape) for each in stored.values())
    described = sum(each.numel() for each in empty.parameters())
    if described > _SPARE * numbers:
        what = f"config.json describes {described:,} parameters, but the files hold {numbers:,}"
        raise ModelError(what, where=str(folder), fix=AGAIN)


def refuse_unknown_weights(model: PreTrainedModel, stored: Iterable[str], *, where: str) -> None:
    """Refuse weights of layers that the model does not have, and biases that its layers do not have.

    The library would leave them out, and the model would compute something else. Other weights that it leaves out
    belong to other parts: a vision tower, heads for several tokens.

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
    """Refuse layers that lack a weight that others have, and weights of another shape than the configuration's.

    Names that the library changes on loading are not compared.
    """
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
    """Return the highest first index of each pattern of names."""
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
    """Return the tensors of the files that the library would load.

    Raises:
        ModelError: There are none, or the index names others.
    """
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
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"the index of the weights cannot be read: {error!r}", where=str(index), fix=AGAIN) from error
    absent = [name for name in shards if not (folder / name).is_file()]
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
