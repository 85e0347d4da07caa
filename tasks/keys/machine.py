"""Machine of a run for keys and reports, without an import of torch if nothing has changed since the last one.

torch decides alone where anything is computed: once it is imported, it is asked.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.config import HardwareConfig, to_dict
from rlcore.strict_config import build
from rlcore.tasks.store.code_hash import closure_digest
from rlcore.tasks.store.remembered import remembered

_MODULE = "rlcore.hardware.machine"
# Variables that select devices, instructions and libraries, by the beginning of their names.
_VARIABLES = re.compile(
    r"(ATEN|CUDA|DNNL|GLIBC|GOMP|GPU|HIP|HSA|KMP|LD|MKL|NVIDIA|OMP|ONEDNN|OPENBLAS|PYTORCH|ROCM|ROCR|TORCH)_.*"
)
_PROCESSORS, _SWINGS = Path("/proc/cpuinfo"), "cpu MHz"  # a line that differs from one reading to the next
_DRIVER = Path("/proc/driver/nvidia")
_DEVICES = ("nvidia*", "kfd", "dri/*", "dxg")


@dataclass(frozen=True, kw_only=True)
class KnownMachine:
    """Machine of a configuration, as JSON.

    ``facts``: fields of :class:`rlcore.hardware.machine.Machine`. ``resolved``: settings that they replace in keys.
    ``warning``: from :func:`rlcore.hardware.machine.slow_dtype_warning`. ``hint``: from :func:`fast_dtype_hint` there.
    ``gpu_bytes``: memory of the GPU; 0 on a CPU. ``gains_packed``: from
    :func:`rlcore.hardware.precision.gains_packed`.
    """

    facts: Mapping[str, Any]
    resolved: tuple[str, ...]
    warning: str
    hint: str
    gpu_bytes: int
    gains_packed: bool


def known_machine(config: HardwareConfig) -> KnownMachine:
    """Return the machine that this process would compute on with this configuration.

    Raises:
        ConfigError: The configured GPU does not exist.
    """
    if not _PROCESSORS.is_file():  # not Linux
        return _from_torch(config)
    found = _remembered(json.dumps(to_dict(config)), "\n".join(_circumstances()), closure_digest(_MODULE))
    if "torch" in sys.modules:
        return _from_torch(config)
    return KnownMachine(**{**found, "resolved": tuple(found["resolved"])})


def _from_torch(config: HardwareConfig) -> KnownMachine:
    from rlcore.hardware import machine
    from rlcore.hardware.memory import total_bytes
    from rlcore.hardware.precision import gains_packed

    found = machine.find_machine(config)
    device, dtype = machine.choose_device_and_dtype(config)
    return KnownMachine(
        facts=to_dict(found),
        resolved=machine.CHOSEN,
        warning=machine.slow_dtype_warning(found),
        hint=machine.fast_dtype_hint(found) if config.dtype == "auto" else "",
        gains_packed=gains_packed(device, dtype),
        gpu_bytes=(total_bytes(device) or 0) if device.type == "cuda" else 0,
    )


@remembered
def _remembered(config: str, circumstances: str, code: str) -> dict[str, Any]:
    """Return a :class:`KnownMachine` as JSON. ``code``: digest of the code that finds it."""
    found: dict[str, Any] = to_dict(_from_torch(build(HardwareConfig, json.loads(config))))
    return found


def _circumstances() -> Iterator[str]:
    """Yield everything from which torch could find another machine: itself, the computer, its devices, variables."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(path for folder in folders or () for name in ("*.py", "lib/*") for path in Path(folder).glob(name))
    yield from (f"{path} {state.st_size} {state.st_mtime_ns}" for path in files for state in (path.stat(),))
    yield f"{socket.gethostname()} {_text(Path('/proc/sys/kernel/random/boot_id'))}"
    yield from sorted({line for line in _text(_PROCESSORS).splitlines() if not line.startswith(_SWINGS)})
    yield f"{os.cpu_count()} {sorted(os.sched_getaffinity(0))}"
    yield from sorted(str(path) for pattern in _DEVICES for path in Path("/dev").glob(pattern))
    gpus = sorted((*_DRIVER.glob("version"), *_DRIVER.glob("gpus/*/information")))
    yield from (f"{path} {_text(path)}" for path in gpus)
    yield from sorted(f"{name}={value}" for name, value in os.environ.items() if _VARIABLES.fullmatch(name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
