"""Makes torch say of this processor what ``TEST_MACHINE_UNITS`` says: half-precision units ``hidden`` or ``pretended``.

Python runs this file at the start of every process whose ``PYTHONPATH`` names its folder, so that it holds in the
processes that tests start, too. See :mod:`tests.machines.run`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

UNITS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
ARE_THERE = {"hidden": False, "pretended": True}.get(os.environ.get("TEST_MACHINE_UNITS", ""))


class _Patched(importlib.abc.Loader):
    """Loads ``torch.cpu`` as it is, then gives it other answers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in UNITS:
            getattr(module, name)  # an AttributeError says that torch has renamed what we emulate
            setattr(module, name, lambda: ARE_THERE)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``torch.cpu`` alone; importing torch here would cost every process seconds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patched(spec.loader)
        return spec


if ARE_THERE is not None:
    sys.meta_path.insert(0, _Finder())
