"""The command that looks at the machine."""

from __future__ import annotations

import sys


def doctor() -> int:
    """Say what this machine can do: device, precision, engines, sandbox, servers, disk, memory, versions.

    A line that begins with FAULT names what the demo needs, and the exit code is 1. One that begins with - is needed by
    some recipes alone.

    ```
    rlcore doctor
    ```
    """
    from tasks.home.doctor import examine, lines
    from tasks.home.settings import find_home

    faults = 0
    for finding in examine(find_home()):
        faults += finding.state == "fault"
        sys.stdout.write(lines(finding) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{faults} of these keep the demo from running\n" if faults else "the demo can run: make demo\n")
    return 1 if faults else 0
