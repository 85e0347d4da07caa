"""What computes the numbers of a run: device, precision, instruction set and threads, found in one place.

What changes the bits of a training step belongs in :class:`Machine`, and so in the keys of stages. Measured with three
AdamW steps of Llamas of width 64, 192 and 576 (digest of the weights; torch 2.13, one AMD processor of family 26):

======================================================================  ========  ========  =======
what was changed                                                        float32   bfloat16  float16
======================================================================  ========  ========  =======
the same once more; other memory contents; glibc without AVX2 and FMA   same      same      same
instruction set of torch (``ATEN_CPU_CAPABILITY=avx2``, ``default``)    differs   differs   differs
half-precision units hidden (``ONEDNN_MAX_CPU_ISA=AVX512_CORE``)        same      differs   same
vendor: MKL believes that the processor is Intel's                      differs   differs   differs
``MKL_CBWR=COMPATIBLE``                                                 differs   differs   differs
one thread or two, on these sizes                                       same      same      same
======================================================================  ========  ========  =======

Threads change sums over much (8,192 tokens or 2 million numbers): of ``sum``, ``mean`` and the gradient of a LayerNorm
with two threads and of a matrix product in bfloat16 with four; where MKL takes Intel's path, also of attention and of a
float32 product with two. Draws of ``torch.randn`` differ between ``default`` and the rest.

No interface names all of these causes (MKL chooses by vendor, and variables of the environment overrule both), so a
digest of a small computation stands in for them: :attr:`Machine.numerics_digest`. It differs in exactly these
columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError

CHOSEN = ("device", "dtype", "num_threads")  # the settings of which a Machine says what they came to
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What computes. Two that are equal are expected to compute the same bits, two that differ to compute others.

    ``device``: ``cpu`` or ``cuda``; ``precision``: dtype of the matrix products. On CUDA ``gpu`` is the card's name and
    compute capability. On a CPU ``instructions`` is torch's instruction set, with the units for half precision where
    the precision is half; ``threads`` how many compute one sum; ``arithmetic`` the digest of a small computation.
    """

    device: str
    precision: str
    gpu: str = ""
    instructions: str = ""
    threads: int = 0
    numerics_digest: str = ""


def find_machine(config: HardwareConfig) -> Machine:
    """What would compute with this configuration, in this process.

    Raises:
        ConfigError: as :func:`choose_device_and_dtype`.
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
        numerics_digest=_arithmetic(dtype),
    )


def slow_dtype_warning(machine: Machine) -> str:
    """A sentence where this CPU computes half precision much slower than float32; empty elsewhere.

    The figures are those of docs/benchmarks/precision.md: bfloat16 needs AVX-512 at least, float16 units of its own.
    """
    needed = {"bfloat16": "AVX512", "float16": "amx_fp16"}.get(machine.precision)
    if machine.device != "cpu" or needed is None or needed in machine.instructions:
        return ""
    return (
        f"this processor has no instructions for {machine.precision}: it takes 16 to 24 times as long as float32; "
        "set hardware.dtype = 'float32' where the precision itself is not to be tried"
    )


def hardware_config_for(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ask for a recorded machine, as far as one can ask: for CUDA only where there is a card."""
    if not machine:
        return {}
    device = "cpu" if machine["device"] == "cpu" else "auto"
    return dict(zip(CHOSEN, (device, machine["precision"], machine["threads"]), strict=True))


def choose_device_and_dtype(config: HardwareConfig) -> tuple[torch.device, torch.dtype]:
    """CUDA where there is one, and there bfloat16 (float16 on a card without bfloat16 units); float32 on a CPU.

    A CPU computes in float32 unless it is asked otherwise, whatever units it has: one curve on every CPU, but for
    rounding.

    Raises:
        ConfigError: a card is asked for that is not there.
    """
    device = _choose_device(config.device)
    if config.dtype != "auto":
        return device, PRECISIONS[config.dtype]
    if device.type == "cpu":
        return device, torch.float32
    has_units = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere was the first with bfloat16
    return device, torch.bfloat16 if has_units else torch.float16


def _choose_device(name: str) -> torch.device:
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if cards else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= cards:
        there = f"the last CUDA device is cuda:{cards - 1}" if cards else "no CUDA device is available"
        raise ConfigError(f"hardware.device is {name!r}, but {there}", fix="set it to 'auto'")
    return device


def _instructions(dtype: torch.dtype) -> str:
    """``AVX512``, or ``AVX512 + avx512_bf16`` in half precision: oneDNN's products differ with the units."""
    units = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported,
        "amx_tile": torch.cpu._is_amx_tile_supported,
        "amx_fp16": torch.cpu._is_amx_fp16_supported,
    }
    found = [name for name, is_there in units.items() if dtype != torch.float32 and is_there()]
    return " + ".join([torch.backends.cpu.get_cpu_capability(), *found])


@cache
def _arithmetic(dtype: torch.dtype) -> str:
    """Digest of draws, matrix products, a softmax and sums on the CPU; it takes milliseconds."""
    draws = torch.Generator().manual_seed(0)
    with _one_thread(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        states, weights = torch.randn(64, 384, generator=draws), torch.randn(384, 512, generator=draws)
        probabilities = (states @ weights).softmax(-1)
        noise = [_rounding_noise(states.to(each), weights.to(each)) for each in (torch.float32, dtype)]
        parts = (states, probabilities, probabilities.log().sum(0), *noise)
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:_DIGITS]


def _rounding_noise(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A product whose terms cancel, in float32: all that is left is how it was rounded, and in which order summed."""
    return (torch.cat([states, states.flip(1)], 1) @ torch.cat([weights, -weights.flip(0)])).float()


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for the moment: how many there are is a field of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
