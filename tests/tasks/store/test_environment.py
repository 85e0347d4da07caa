from __future__ import annotations

import hashlib
import platform

import torch

from rlcore.tasks.store.environment import pins, pins_digest


def test_the_pins_name_the_interpreter_and_every_package_once_in_order() -> None:
    first, *lines = pins().splitlines()
    assert first == f"python=={platform.python_version()}"
    assert lines == sorted(set(lines))
    (pinned,) = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    assert pinned.partition("+")[0] == torch.__version__.partition("+")[0]  # the build, "+cu130", is not always named
    assert pins_digest() == hashlib.sha256(pins().encode()).hexdigest()
