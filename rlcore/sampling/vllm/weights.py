"""Weights for a vLLM engine: checks, names and files that another process reads, and comparison with the engine.

transformers renames and fuses weights in memory: the experts of a layer are one tensor in memory and hundreds in a
checkpoint. Its own conversion, reversed for one tensor at a time, gives the names in the checkpoint.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlcore.errors import ModelError, SamplingError
from rlcore.models.lora import AdaptedModel, MergedState
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.worker.checksums import adapter_part, add, bit_checksum, state_checksums

_MEMORY = Path("/dev/shm")
_CACHED = 8  # converted tensors to keep: the projections of one layer are read alternately
_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Version of the weights on disk: a safetensors file, or the folder of the checkpoint that an engine starts from.

    ``is_adapter``: ``path`` is the folder of a LoRA adapter in peft's format, applied to the served base.
    """

    path: Path
    is_adapter: bool = False


def pack(
    state: Mapping[str, torch.Tensor], path: Path, *, spec: ServerSpec, shapes: Mapping[str, tuple[int, ...]]
) -> Weights:
    """Check ``state`` against the ``shapes`` of the server's checkpoint, and write the weights to ``path``.

    The file stays while it is served, so that a restarted server can read it again.

    Raises:
        SamplingError: Names or shapes differ.
        OSError, SafetensorError: There is no room.
    """
    adapted = state.adapted if isinstance(state, MergedState) and spec.lora_rank else None
    state = state if adapted else to_checkpoint_names(state, spec.model)
    problems = adapter_mismatches(shapes, adapted.adapter_shapes()) if adapted else shape_mismatches(shapes, state)
    if problems:
        raise SamplingError(
            f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
            where=str(spec.model),
            fix="send the whole state_dict() of a model of the same architecture",
        )
    if adapted:
        adapted.save_adapter(path)
        return Weights(path=path, is_adapter=True)
    write_weights(state, path, shapes=shapes, dtype=getattr(torch, spec.dtype))
    return Weights(path=path)


def discard(path: Path) -> None:
    """Remove the file that :func:`pack` wrote."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint folder stores; tied tensors have one name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
    return shapes


def shape_mismatches(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return why ``state`` does not match the checkpoint. A second name of a stored tensor must have equal values."""
    missing = [f"{name} is missing" for name in shapes if name not in state]
    other = [
        f"{name} has a different shape" for name in shapes if name in state and tuple(state[name].shape) != shapes[name]
    ]
    extra = [
        f"{name} is unknown, or tied in the engine and different here"
        for name in state
        if name not in shapes and not any(_is_same(state[name], state[twin]) for twin in shapes if twin in state)
    ]
    return sorted(missing + other + extra)


def adapter_mismatches(shapes: Mapping[str, tuple[int, ...]], adapter: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return why an adapter does not match the checkpoint. ``adapter``: shapes of the weights that it changes."""
    return [
        f"{name} has no weight of the adapter's shape" for name in sorted(adapter) if shapes.get(name) != adapter[name]
    ]


def write_weights(
    state: Mapping[str, torch.Tensor], path: Path, *, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Write the tensors of ``state`` that ``shapes`` names in ``dtype``, with one tensor at a time in CPU memory.

    The library's writer needs all tensors in memory. The format (https://huggingface.co/docs/safetensors): the header's
    length in 8 bytes, the header, the tensors' bytes without gaps.

    Raises:
        OSError: There is no room.
    """
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}")
    try:
        with unfinished.open("wb") as file:
            file.write(_header(shapes, dtype))
            for name in shapes:
                tensor = state[name].detach().to(dtype).cpu().contiguous()
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def make_weight_dir(named: str, *, num_bytes: int) -> Path:
    """Create a folder for weight files: in ``named``, else in memory if three files fit there, else temporary.

    The three, of ``num_bytes`` each, are the served weights, the next ones, and a reserve.
    """
    if named:
        return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=named))
    fits = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3 * num_bytes
    return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=_MEMORY if fits else None))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def differing_parts(
    answers: Sequence[Mapping[str, Any]],
    state: Mapping[str, torch.Tensor],
    *,
    is_adapter: bool,
    dtype: torch.dtype,
    seed: int,
) -> list[str]:
    """Return the parts whose checksums differ; ``answers``: those of ``engine_checksums`` of each worker.

    ``is_adapter``: True if the engine has the base's weights, and separately the adapter of ``state``.
    """
    found: dict[str, int] = {}
    for answer in answers:
        for part, value in answer["sums"].items():
            add(found, part, value)
    adapted = state.adapted if is_adapter and isinstance(state, MergedState) else None
    whole = MergedState(AdaptedModel(adapted.base, "")) if adapted else state
    expected = state_checksums(whole.items(), dtype=dtype, seed=seed, by_columns=answers[0]["by_columns"])
    if adapted:
        expected |= adapter_checksums(adapted, dtype)
    return sorted(part for part in {*found, *expected} if found.get(part, 0) != expected.get(part, 0))


def adapter_checksums(adapted: AdaptedModel, dtype: torch.dtype) -> dict[str, int]:
    """Return the checksums of an adapter as vLLM stores it: in ``dtype``, with B multiplied by alpha / rank."""
    config = adapted.base.peft_config[adapted.name]
    scale = config.lora_alpha / config.r
    sums: dict[str, int] = {}
    for path, parameter in adapted.named_parameters():
        name = path.replace("/", ".")
        kept = parameter.detach().to(dtype)
        add(sums, adapter_part(name), bit_checksum(kept * scale if ".lora_B." in name else kept))
    return sums


def to_checkpoint_names(state: Mapping[str, torch.Tensor], checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Map a complete ``state_dict()`` to the names in ``checkpoint``; returns it unchanged if the names agree.

    Raises:
        ModelError: The library's conversion needs several tensors together.
    """
    model, sources = _layout(checkpoint)
    is_equal = all(name == source for name, source in sources.items())
    return state if is_equal else CheckpointNameView(state, model, sources)


class CheckpointNameView(Mapping[str, torch.Tensor]):
    """Tensors of ``state`` by stored names, converted when they are read.

    ``sources``: name in ``state`` by stored name. Tensors unknown to the layout keep their names.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], model: PreTrainedModel, sources: Mapping[str, str]) -> None:
        used = set(sources.values())
        self._state, self._model = state, model
        self._sources = {name: source for name, source in sources.items() if source in state}
        self._sources |= {name: name for name in state if name not in used}
        self._converted: dict[str, dict[str, torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        if source not in self._converted:
            while len(self._converted) >= _CACHED:
                del self._converted[next(iter(self._converted))]
            self._converted[source] = _convert(self._model, source, self._state[source])
        return self._converted[source][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _convert(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: tensor})
    return converted


@functools.lru_cache(maxsize=4)
def _layout(checkpoint: Path) -> tuple[PreTrainedModel, Mapping[str, str]]:
    """Return the model of a checkpoint without weights, and the names in memory by stored name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    whole = revert_weight_conversion(model, state)
    parts = {name: _convert(model, name, tensor) for name, tensor in state.items()}
    sources = {stored: name for name, converted in parts.items() for stored in converted}
    if sources.keys() != whole.keys() or any(
        whole[stored].shape != parts[name][stored].shape for stored, name in sources.items()
    ):
        raise ModelError(
            f"the weights of {type(model).__name__} cannot be converted to checkpoint names one by one",
            where=str(checkpoint),
            fix="use sampling.engine.kind = 'native'",
        )
    return model, sources
