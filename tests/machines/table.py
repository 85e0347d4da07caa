"""Processors that the tests are tried on, emulated on the one that is there. None has more than it has.

Torch (``ATEN_CPU_CAPABILITY``), oneDNN (``ONEDNN_MAX_CPU_ISA``) and MKL (``MKL_CBWR``) choose instructions each by
itself. What torch says of units for half precision, ``tests/machines/startup`` answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).resolve().parent / "startup"


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A processor: what it is in words, and the variables that make the libraries take this one for it."""

    says: str
    variables: Mapping[str, str]


MACHINES: Mapping[str, Emulated] = {
    "hidden": Emulated(
        says="no units for half precision: Intel before Cooper Lake and Sapphire Rapids, AMD before Zen 4",
        variables={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "TEST_MACHINE_UNITS": "hidden"},
    ),
    "pretended": Emulated(
        says="torch says that bfloat16, AMX and AMX-float16 units are there",
        variables={"TEST_MACHINE_UNITS": "pretended"},
    ),
    "avx2": Emulated(
        says="AVX2 and no AVX-512: laptops, AMD before Zen 4",
        variables={
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_CBWR": "AVX2",
            "TEST_MACHINE_UNITS": "hidden",
        },
    ),
    "default": Emulated(
        says="the oldest code of torch, oneDNN and MKL: SSE",
        variables={
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_CBWR": "COMPATIBLE",
            "TEST_MACHINE_UNITS": "hidden",
        },
    ),
}


def environment_of(machine: Emulated) -> dict[str, str]:
    """This process's environment, with what makes a process and its children believe that they run there."""
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **machine.variables, "PYTHONPATH": os.pathsep.join(paths)}
