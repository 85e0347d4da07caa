from __future__ import annotations

import hashlib
import platform

import torch

from tasks.home.environment import pins, pins_digest


def test_the_pins_name_the_interpreter_and_every_package_once_in_order() -> None:
    first, *lines = pins().splitlines()
    assert first == f"python=={platform.python_version()}"
    assert lines == sorted(set(lines))
    assert any(line.startswith("torch==") and line.removeprefix("torch==") in torch.__version__ for line in lines)
    assert pins_digest() == hashlib.sha256(pins().encode()).hexdigest()
