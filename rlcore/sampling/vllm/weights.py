"""Weights for a vLLM engine: names, checks, files that another process reads, and comparison with the engine.

transformers renames and fuses weights in memory: the experts of a layer are one tensor in memory and hundreds in a
checkpoint, and GPT-NeoX's head has another name. Its reversed conversion gives the stored names, here for one tensor at
a time, so that no second model is in memory.
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
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlcore.config import TransferKind
from rlcore.errors import ModelError, SamplingError
from rlcore.models.lora import AdaptedModel, MergedState
from rlcore.models.model_validation import empty_model
from rlcore.sampling.base import weight_mismatches
from rlcore.sampling.vllm.process import BY_FILE, ServerSpec
from rlcore.sampling.vllm.worker.checksums import adapter_part, add, bit_checksum, state_checksums

DIRECT: frozenset[TransferKind] = frozenset(("nccl", "ipc"))  # from GPU to GPU, without a file
_MEMORY = Path("/dev/shm")
_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
)


class TensorMeta(NamedTuple):
    """Metadata of a tensor, which vLLM needs before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights:
    """Version of the weights: a safetensors file, or the folder of the checkpoint that an engine starts from.

    Attributes:
        live: The trainer's tensors, converted when read; None once it has others.
        is_adapter: ``path`` is a LoRA in peft's format for the served base.
    """

    path: Path
    live: Converted | None = None
    is_adapter: bool = False

    @property
    def is_live_alone(self) -> bool:
        return self.live is not None and not self.path.exists()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by its checkpoint name, always in the same order."""
        return iter(self.live.items()) if self.live is not None else stored_tensors(self.path)

    def metadata(self) -> list[TensorMeta]:
        """Return name, type and shape of every tensor, in that order, converting none."""
        if self.live is not None:
            return [TensorMeta(name, self.live.dtype, shape) for name, shape in self.live.shapes.items()]
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored_tensors(self.path)]

    def stored(self) -> Path:
        """Return the path for a server, writing the file first if it does not exist.

        Raises:
            SamplingError: The weights were never stored, and the trainer has other weights now.
        """
        if self.live is not None and not self.path.exists():
            write_weights(self.live, self.path)
        if not self.path.exists():
            raise SamplingError(
                "the weights that the engine served were not stored, and the trainer has newer ones",
                fix="rerun: the run resumes from its newest checkpoint",
            )
        return self.path


def pack(
    state: Mapping[str, torch.Tensor], path: Path, *, spec: ServerSpec, shapes: Mapping[str, tuple[int, ...]]
) -> Weights:
    """Check ``state`` against the ``shapes`` of the server's checkpoint, and write the weights to ``path``.

    The file stays while it is served, for restarts; none is written unless :func:`needs_file`.

    Raises:
        SamplingError: Names or shapes differ.
        OSError, SafetensorError: There is no room.
    """
    adapted = state.adapted if isinstance(state, MergedState) and spec.lora_rank else None
    state = state if adapted else to_checkpoint_names(state, spec.model)
    problems = adapter_mismatches(shapes, adapted.adapter_shapes()) if adapted else weight_mismatches(shapes, state)
    if problems:
        raise SamplingError(
            f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
            where=str(spec.model),
            fix="send the whole state_dict() of a model of the same architecture",
        )
    if adapted:
        adapted.save_adapter(path)
        return Weights(path=path, is_adapter=True)
    converted = Converted(state, shapes=shapes, dtype=getattr(torch, spec.dtype))
    if needs_file(spec):
        write_weights(converted, path)
    return Weights(path=path, live=converted)


def needs_file(spec: ServerSpec) -> bool:
    """Return True if a server reads the weights from a file, or may have to after a restart.

    A restarted server can get the trainer's weights unless these change while it samples.
    """
    return spec.transfer in BY_FILE or (not spec.url and (spec.transfer not in DIRECT or spec.trainer_moves))


def discard(path: Path) -> None:
    """Remove the file that :func:`pack` wrote."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint stores; tied ones have one name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
    return shapes


def adapter_mismatches(shapes: Mapping[str, tuple[int, ...]], adapter: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return why an adapter does not match the checkpoint. ``adapter``: shapes of the weights that it changes."""
    return [
        f"{name} has no weight of the adapter's shape" for name in sorted(adapter) if shapes.get(name) != adapter[name]
    ]


class Converted(Mapping[str, torch.Tensor]):
    """Tensors of ``state`` that ``shapes`` names, in ``dtype``, contiguous, on their device."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], *, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._state, self.shapes, self.dtype = state, shapes, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[name].detach().to(self.dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def write_weights(weights: Converted, path: Path) -> None:
    """Write the weights in the safetensors format, with one tensor at a time in CPU memory.

    The library's writer needs all. The format (https://huggingface.co/docs/safetensors): the header's length in 8
    bytes, the header, the tensors' bytes without gaps.

    Raises:
        OSError: There is no room.
    """
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}")
    try:
        with unfinished.open("wb") as file:
            file.write(_header(weights))
            for tensor in weights.values():
                file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _header(weights: Converted) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in weights.shapes.items():
        start, end = end, end + math.prod(shape) * weights.dtype.itemsize
        entries[name] = {"dtype": _DTYPES[weights.dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def stored_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a safetensors file, or of a folder of such files. Tied tensors occur once."""
    for each in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(each, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 no mapping
                yield name, file.get_tensor(name)


def make_weight_dir(named: str, *, num_bytes: int) -> Path:
    """Create a folder for weight files: in ``named``, else in memory if three files fit there, else temporary."""
    if named:
        return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=named))
    return Path(tempfile.mkdtemp(prefix="rlcore-weights-", dir=_MEMORY if fits_in_memory(num_bytes) else None))


def fits_in_memory(num_bytes: int) -> bool:
    """Return True if three files of ``num_bytes`` fit in memory: served, next, reserve."""
    return _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3 * num_bytes


def differing_parts(
    answers: Sequence[Mapping[str, Any]],
    state: Mapping[str, torch.Tensor],
    *,
    is_adapter: bool,
    dtype: torch.dtype,
    seed: int,
) -> list[str]:
    """Return the parts whose checksums differ.

    Args:
        answers: Result of ``engine_checksums`` of each worker.
        is_adapter: The engine has the adapter of ``state`` apart from its base.
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


_CACHED = 8  # converted tensors to keep: the projections of one layer are read alternately


def to_checkpoint_names(state: Mapping[str, torch.Tensor], checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Map a complete ``state_dict()`` to the names in ``checkpoint``; returns it unchanged if the names agree.

    Raises:
        ModelError: The library's conversion needs several tensors together.
    """
    model, sources = _layout(checkpoint)
    return state if all(name == source for name, source in sources.items()) else _CheckpointNames(state, model, sources)


class _CheckpointNames(Mapping[str, torch.Tensor]):
    """Tensors of ``state`` by stored names, converted when they are read.

    ``sources``: name in ``state`` by stored name.
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
    """Return a checkpoint's model without weights, and its name in memory by stored name."""
    model = empty_model(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
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
