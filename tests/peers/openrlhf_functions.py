"""OpenRLHF's losses, without its GPU stack.

Its packages import DeepSpeed and flash-attention when they are loaded. The losses use neither, so their package is
entered without running its ``__init__``, and DeepSpeed is an empty module.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers  # noqa: F401  # first: it looks for DeepSpeed, and must not find the empty module


def _load() -> Any:
    spec = find_spec("openrlhf")
    assert spec is not None and spec.origin is not None
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(Path(spec.origin).parent / "models")]
    sys.modules["openrlhf.models"] = package
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    found = importlib.import_module("openrlhf.models.loss")
    del sys.modules["deepspeed"]  # other libraries ask whether it is installed
    return found


losses = _load()
