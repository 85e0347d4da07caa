"""Machine that computes a run: device, precision, instruction set and threads.

:class:`Machine` holds everything that changes the bits of a training step, and is part of the cache keys. Trained
weights differ with the instruction set of torch (``ATEN_CPU_CAPABILITY``), with the vendor as MKL sees it and with
``MKL_CBWR``; in bfloat16 also with half-precision units (``ONEDNN_MAX_CPU_ISA``); and with threads in large sums.

No interface names all of these causes: MKL chooses by vendor, and environment variables override both. The digest of a
small computation, :attr:`Machine.numerics_digest`, represents them.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError

CHOSEN = ("device", "dtype", "num_threads")  # settings that a Machine resolves
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware and precision of a computation. Equal machines compute equal bits.

    Attributes:
        device: ``cpu`` or ``cuda``.
        precision: dtype of the matrix products.
        gpu: Name and compute capability of the GPU; empty on a CPU.
        instructions: Instruction set of torch, with half-precision units if the precision is half; empty on CUDA.
        threads: Threads that compute one sum; 0 on CUDA.
        numerics_digest: Digest of a small computation; empty on CUDA.
    """

    device: str
    precision: str
    gpu: str = ""
    instructions: str = ""
    threads: int = 0
    numerics_digest: str = ""


def find_machine(config: HardwareConfig) -> Machine:
    """Return the machine that this process would compute on with this configuration.

    Raises:
        ConfigError: As :func:`choose_device_and_dtype`.
    """
    device, dtype = choose_device_and_dtype(config)
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return Machine(device="cuda", precision=precision, gpu=f"{name} (compute capability {major}.{minor})")
    return Machine(
        device="cpu",
        precision=precision,
        instructions=_instructions(dtype),
        threads=config.num_threads or torch.get_num_threads(),
        numerics_digest=_numerics_digest(dtype),
    )


def slow_dtype_warning(machine: Machine) -> str:
    """Return a warning if this CPU computes half precision much slower than float32, else "".

    bfloat16 needs AVX-512, float16 its own units (docs/benchmarks/learning.md).
    """
    needed = {"bfloat16": "AVX512", "float16": "amx_fp16"}.get(machine.precision)
    if machine.device != "cpu" or needed is None or needed in machine.instructions:
        return ""
    return (
        f"this processor has no instructions for {machine.precision}, which takes 16 to 24 times as long as float32; "
        "set hardware.dtype = 'float32' unless you test that precision"
    )


def fast_dtype_hint(machine: Machine) -> str:
    """Return a hint if this CPU computes bfloat16 much faster than the float32 of ``machine``, else "".

    Measured in docs/benchmarks/speed.md.
    """
    has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if machine.device != "cpu" or machine.precision != "float32" or not has_units:
        return ""
    return (
        "this processor has units for bfloat16: with hardware.dtype = 'bfloat16' an update takes about half the time; "
        "weights stay float32"
    )


def hardware_config_for(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that select a recorded machine as far as possible; for CUDA only if a GPU exists."""
    if not machine:
        return {}
    device = "cpu" if machine["device"] == "cpu" else "auto"
    return dict(zip(CHOSEN, (device, machine["precision"], machine["threads"]), strict=True))


def choose_device_and_dtype(config: HardwareConfig) -> tuple[torch.device, torch.dtype]:
    """Resolve ``auto``: CUDA if available, with bfloat16 (float16 without bfloat16 units); else a CPU with float32.

    A CPU computes in float32 by default, even with half-precision units, so that curves of different CPUs differ by
    rounding only.

    Raises:
        ConfigError: The configured GPU does not exist.
    """
    device = _choose_device(config.device)
    if config.dtype != "auto":
        return device, PRECISIONS[config.dtype]
    if device.type == "cpu":
        return device, torch.float32
    has_units = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere was the first with bfloat16
    return device, torch.bfloat16 if has_units else torch.float16


def _choose_device(name: str) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        there = f"the last CUDA device is cuda:{gpus - 1}" if gpus else "no CUDA device is available"
        raise ConfigError(f"hardware.device is {name!r}, but {there}", fix="set it to 'auto'")
    return device


def _instructions(dtype: torch.dtype) -> str:
    """Return ``AVX512``, or ``AVX512 + avx512_bf16`` in half precision: oneDNN's products depend on the units."""
    units = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported,
        "amx_tile": torch.cpu._is_amx_tile_supported,
        "amx_fp16": torch.cpu._is_amx_fp16_supported,
    }
    found = [name for name, is_there in units.items() if dtype != torch.float32 and is_there()]
    return " + ".join([torch.backends.cpu.get_cpu_capability(), *found])


def product_seconds(dtype: torch.dtype) -> float:
    """Return the CPU seconds of a product of two matrices [768, 768] on one thread, the least of three."""
    factor, seconds = torch.ones(768, 768, dtype=dtype), []
    with _one_thread():
        for _ in range(3):
            start = time.process_time()
            factor @ factor
            seconds.append(time.process_time() - start)
    return min(seconds)


@cache
def _numerics_digest(dtype: torch.dtype) -> str:
    draws = torch.Generator().manual_seed(0)
    with _one_thread(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        states, weights = torch.randn(64, 384, generator=draws), torch.randn(384, 512, generator=draws)
        probabilities = (states @ weights).softmax(-1)
        noise = [_rounding_noise(states.to(each), weights.to(each)) for each in (torch.float32, dtype)]
        parts = (states, probabilities, probabilities.log().sum(0), *noise)
        if torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64"):  # as in rlcore.hardware.precision
            parts += (torch.ops.mkldnn._linear_pointwise(states, weights.T, None, "none", [], ""),)
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:_DIGITS]


def _rounding_noise(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a float32 product whose terms cancel, which leaves rounding and the order of summation."""
    return (torch.cat([states, states.flip(1)], 1) @ torch.cat([weights, -weights.flip(0)])).float()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, since the number of threads is its own field."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
