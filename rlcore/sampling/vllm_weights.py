"""What a vLLM server is handed: the whole weights or an adapter alone, checked, and kept while they are served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlcore.config import TransferKind
from rlcore.errors import SamplingError
from rlcore.models.lora import MergedState
from rlcore.models.weight_names import as_stored
from rlcore.sampling.vllm_process import ServerSpec
from rlcore.sampling.weight_files import Converted, adapter_misfits, misfits, stored_tensors, write_weights

DIRECT: frozenset[TransferKind] = frozenset(("nccl", "ipc"))  # from the trainer's GPU, without a file in between


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights:
    """One version on its way: a safetensors file, or the folder of the checkpoint that an engine starts from.

    ``is_adapter``: the folder of an adapter in peft's format, for the engine to put on the base that it serves.
    ``live``: the same tensors in the trainer's memory and the engine's precision, made when read; None where there are
    none any more.
    """

    path: Path
    live: Converted | None = None
    is_adapter: bool = False

    @property
    def is_live_alone(self) -> bool:
        """Whether there is no file of them yet."""
        return self.live is not None and not self.path.exists()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by its name in the checkpoint, always in the same order."""
        return iter(self.live.items()) if self.live is not None else stored_tensors(self.path)

    def listed(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of every tensor, in the order of :meth:`tensors`; live ones are not made for it."""
        if self.live is not None:
            return [(name, self.live.dtype, shape) for name, shape in self.live.shapes.items()]
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored_tensors(self.path)]

    def stored(self) -> Path:
        """Where a server finds them; a file is written where there is none.

        Raises:
            SamplingError: they were the trainer's alone, which has others by now.
        """
        if self.live is not None and not self.path.exists():
            write_weights(self.live, self.path)
        if not self.path.exists():
            raise SamplingError(
                "the weights that the engine served are in no file, and the trainer has others by now",
                fix="start the run again: it goes on from its newest checkpoint",
            )
        return self.path


def pack(
    state: Mapping[str, torch.Tensor], path: Path, *, spec: ServerSpec, shapes: Mapping[str, tuple[int, ...]]
) -> Weights:
    """Check ``state`` against the stored ``shapes`` of the server's checkpoint, and leave at ``path`` what is sent.

    It stays there while it is served, so that a server that died gets it again. Weights that go from GPU to GPU, or to
    a server that is not ours to start again, are written only where a server reads a file.

    Raises:
        SamplingError: other names or shapes.
        OSError, SafetensorError: there is no room.
    """
    adapted = state.adapted if isinstance(state, MergedState) and spec.adapter_rank else None
    state = state if adapted else as_stored(state, spec.model)
    problems = adapter_misfits(shapes, adapted.adapter_shapes()) if adapted else misfits(shapes, state)
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
    """Whether a server reads the weights from a file, or may have to when it is started again.

    The trainer's own weights stand in for the file of a server of ours, except where they move while it samples.
    """
    if spec.transfer in ("file", "shared_memory"):
        return True
    return not spec.url and (spec.transfer not in DIRECT or spec.trainer_moves)


def discard(path: Path) -> None:
    """Remove what :func:`pack` left."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
