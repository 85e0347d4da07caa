"""Exported weights: a mapping that reads tensors from a file of another process on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class ExportedWeights(Mapping[str, torch.Tensor]):
    """Mapping of the tensors of a safetensors file; none is kept in memory."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self._file, self._names = file, tuple(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
