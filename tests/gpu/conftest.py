"""Tests of what only a GPU shows, and on a CPU a part of them, so that they cannot rot.

    make test-gpu                                     on the GPU, with any python that has torch, transformers and peft
    python -m pytest -c tests/gpu/pytest.ini tests/gpu --device cpu

They need torch, transformers, safetensors, numpy, peft, pyarrow and pytest, and reach for nothing outside.
"""

from __future__ import annotations

import pytest
import torch

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), help="where to compute (default: cpu in the whole suite)")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that was asked for; in a run of all of the project's tests, the CPU."""
    name = request.config.getoption("--device", default=None) or "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("there is no CUDA device here: --device cpu runs what a CPU can show", returncode=2)
    return torch.device(name)


@pytest.fixture
def card(device: torch.device) -> torch.device:
    """The GPU; a test that asks for it is skipped on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(params=PRECISIONS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return PRECISIONS[request.param]
