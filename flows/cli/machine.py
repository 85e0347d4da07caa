"""Commands that inspect the machine and upgrade a state directory."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter


def upgrade() -> int:
    """Upgrade the databases of a state directory to the installed MLflow and Prefect, each after a copy.

    Other commands reject a state directory of an older version until then. Older versions cannot read it afterwards;
    its folder backups has the copies.

    ```
    rlcore upgrade
    ```
    """
    from rlcore.tasks.store.settings import find_home, prepare_environment
    from rlcore.tasks.store.state import upgrade as bring_up

    home = find_home()
    prepare_environment(home)
    upgraded = bring_up(home)
    sys.stdout.write("\n".join(upgraded or ("every database is of the installed versions",)) + "\n")
    return 0


def doctor(
    *, services: Annotated[bool, Parameter(help="Check the servers and their schedules instead.")] = False
) -> int:
    """Check this machine: device, precision, engines, sandbox, servers, disk, memory, versions.

    A line that begins with MISSING names a requirement of the demo, and the exit code is 1. A line that begins with -
    names a requirement of some recipes only. With `--services` the lines are about servers, worker, scheduler,
    deployments, dumps and disk.

    ```
    rlcore doctor
    rlcore doctor --services
    ```
    """
    from rlcore.tasks.operations.doctor import check_services, lines, run_checks
    from rlcore.tasks.store.settings import find_home

    errors = 0
    for finding in (check_services if services else run_checks)(find_home()):
        errors += finding.state == "missing"
        sys.stdout.write(lines(finding) + "\n")
        sys.stdout.flush()
    if not services:
        ending = f"{errors} of these keep the demo from running" if errors else "the demo can run: rlcore run"
        sys.stdout.write(ending + "\n")
    return 1 if errors else 0
