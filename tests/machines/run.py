"""All fast tests on every emulated processor: ``python -m tests.machines.run [NAME ...] [-- pytest's arguments]``.

Each machine takes the files of tests in an order of its own. The last lines have one line per machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from tests.machines.table import MACHINES, ROOT, Emulated, environment_of

FAST = "not slow and not peers and not engine and not services and not scale"
WHAT_COMPUTES = "from rlcore.hardware.machine import *; print(find_machine(HardwareConfig(device='cpu')))"


def main(arguments: Sequence[str]) -> int:
    """Run; the number of machines with a failure. Unknown names end with 2."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = list(arguments[:place]) or list(MACHINES), arguments[place + 1 :]
    if unknown := [name for name in names if name not in MACHINES]:
        print(f"unknown machines: {', '.join(unknown)}; there are {', '.join(MACHINES)}")  # noqa: T201
        return 2
    lines, failed = [], 0
    for seed, name in enumerate(names, start=1):
        code, line = run_tests(name, MACHINES[name], [f"--order-seed={seed}", *options])
        lines.append(line)
        failed += code != 0
    print("\n" + "\n".join(lines), flush=True)  # noqa: T201
    return min(failed, 1)


def run_tests(name: str, machine: Emulated, options: Sequence[str]) -> tuple[int, str]:
    """The exit code of the tests on a machine, and its line of the summary."""
    variables = " ".join(f"{key}={value}" for key, value in machine.variables.items())
    print(f"\n=== {name}: {machine.says}\n    {variables}\n    {what_computes(machine)}", flush=True)  # noqa: T201
    command = [sys.executable, "-m", "pytest", "-q", "-m", FAST, "-n", "2", "--dist", "loadfile", *options]
    started, last = time.monotonic(), ""
    with subprocess.Popen(
        [*command, "--no-loadscope-reorder"], env=environment_of(machine), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)  # noqa: T201
            last = line.strip() or last
    verdict = "ok" if process.returncode == 0 else f"FAILED ({process.returncode})"
    return process.returncode, f"{name:<10} {verdict}: {last} [{time.monotonic() - started:.0f} s]"


def what_computes(machine: Emulated) -> str:
    command = [sys.executable, "-c", WHAT_COMPUTES]
    return subprocess.check_output(command, env=environment_of(machine), cwd=ROOT, text=True).strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
