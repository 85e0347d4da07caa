"""Serialization of values for other processes: plain values and known dataclasses as JSON, tensors as bytes.

    8 bytes: length of the JSON | JSON, in which a tensor is {"tensor": [dtype, shape, number]} | tensors' bytes

Paths become absolute, since other processes may have other working folders.

Nothing is pickled: decoding creates only the kinds below.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import traceback
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from rlcore import config, errors
from rlcore.distributed.build import LearnerPlan
from rlcore.distributed.build_supervised import SupervisedPlan
from rlcore.errors import RlcoreError
from rlcore.hardware.machine import PRECISIONS
from rlcore.hardware.memory import Footprint
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import SamplingParams
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.features import Features
from rlcore.training.audit.shuffle_gap import ShuffleGap
from rlcore.training.audit.slow_path import SlowPathResult
from rlcore.training.audit.trials import Gradient, Trial
from rlcore.training.preferences import PreferenceSet, TokenPair
from rlcore.training.scoring_models import ForwardScores
from rlcore.training.update_stats import UpdateStats
from rlcore.types import FailedRollout, Message, Prompt, Rollout, Score, ToolCall, TrainingSample

_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        Demonstration,
        SlowPathResult,
        FailedRollout,
        Features,
        Footprint,
        Gradient,
        LearnerPlan,
        Message,
        ShuffleGap,
        ForwardScores,
        PreferenceSet,
        Prompt,
        Rollout,
        Runtime,
        SamplingParams,
        Score,
        SupervisedPlan,
        TokenPair,
        TokenSequence,
        ToolCall,
        TrainingSample,
        Trial,
        UpdateStats,
        *(kind for kind in vars(config).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)),
    )
}


def encode(value: Any) -> bytes:
    """Serialize a value of numbers, texts, paths, lists, tables, tensors, dtypes, devices and the dataclasses above.

    Raises:
        TypeError: The value contains another kind.
    """
    parts: list[bytes] = []
    plain = _plain(value, parts)
    text = json.dumps({"value": plain, "ends": list(accumulate(map(len, parts)))}).encode()
    return b"".join((struct.pack("<Q", len(text)), text, *parts))


def decode(data: bytes) -> Any:
    """Restore a value of :func:`encode`; lists and tuples become tuples, tensors are on the CPU."""
    (length,) = struct.unpack_from("<Q", data)
    found, numbers = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    starts = [0, *found["ends"]]
    return _value(found["value"], [numbers[start:end] for start, end in pairwise(starts)])


def encode_error(error: Exception) -> dict[str, Any]:
    """Return an error as a table with one of ``error``, ``memory`` and ``crash``."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"memory": str(error).partition(". ")[0]}
    if isinstance(error, RlcoreError):
        return {"error": [type(error).__name__, error.what, error.where, error.fix]}
    traceback.print_exception(error)
    return {"crash": f"{type(error).__name__}: {error}"}


def is_error(answer: Mapping[str, Any]) -> bool:
    """Return True if an answer is a result of :func:`encode_error`."""
    return bool({"error", "memory", "crash"} & answer.keys())


def decode_error(error: Mapping[str, Any]) -> RlcoreError:
    """Restore an error of this library."""
    name, what, where, fix = error["error"]
    kind: type[RlcoreError] = getattr(errors, name)
    return kind(what, where=where, fix=fix)


def _plain(value: Any, parts: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        parts.append(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return {"tensor": [_name(value.dtype), list(value.shape), len(parts) - 1]}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, Mapping):
        return {"map": [[_plain(key, parts), _plain(each, parts)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(each, parts) for each in value]
    if isinstance(value, Path):
        return {"path": str(value.absolute())}
    if _KINDS.get(type(value).__name__) is type(value):
        fields = {each.name: _plain(getattr(value, each.name), parts) for each in dataclasses.fields(value)}
        return {"kind": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value(plain: Any, parts: Sequence[bytearray]) -> Any:
    if isinstance(plain, list):
        return tuple(_value(each, parts) for each in plain)
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        dtype, shape, index = plain["tensor"]
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.frombuffer(parts[index], dtype=kind) if parts[index] else torch.empty(0, dtype=kind)
        return flat.reshape(shape)
    if "dtype" in plain:
        return PRECISIONS[plain["dtype"]]
    if "device" in plain:
        return torch.device(plain["device"])
    if "map" in plain:
        return {_value(key, parts): _value(each, parts) for key, each in plain["map"]}
    if "path" in plain:
        return Path(plain["path"])
    return _KINDS[plain["kind"]](**{name: _value(each, parts) for name, each in plain["fields"].items()})
