"""The commands that look at the machine, and bring a home up to what is installed on it."""

from __future__ import annotations

import sys


def upgrade() -> int:
    """Bring the databases of a home up to the installed versions of MLflow and Prefect, each after a copy.

    A home that an older version wrote is refused until then. Older versions do not read it afterwards: the copies, in
    its folder backups, are the way back.

    ```
    rlcore upgrade
    ```
    """
    from rlcore.tasks.store.settings import find_home, prepare_environment
    from rlcore.tasks.store.state import upgrade as bring_up

    home = find_home()
    prepare_environment(home)
    told = bring_up(home)
    sys.stdout.write("\n".join(told or ("every database is of the installed versions",)) + "\n")
    return 0


def doctor() -> int:
    """Say what this machine can do: device, precision, engines, sandbox, servers, disk, memory, versions.

    A line that begins with MISSING names what the demo needs, and the exit code is 1. One that begins with - is needed
    by some recipes alone.

    ```
    rlcore doctor
    ```
    """
    from rlcore.tasks.store.doctor import lines, run_checks
    from rlcore.tasks.store.settings import find_home

    errors = 0
    for finding in run_checks(find_home()):
        errors += finding.state == "missing"
        sys.stdout.write(lines(finding) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{errors} of these keep the demo from running\n" if errors else "the demo can run: make demo\n")
    return 1 if errors else 0
