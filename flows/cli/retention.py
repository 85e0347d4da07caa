"""Commands that dump databases and remove what is not needed any more."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import open_home
from rlcore.tasks.store.settings import configure_logging, find_home


def gc(
    *,
    keep_days: Annotated[int, Parameter(help="Age in days from which something can go.")] = 30,
    delete: Annotated[bool, Parameter(help="Remove it; default: only show what would be removed.")] = False,
) -> int:
    """Show what no registered version, run or preset needs any more, or remove it with --delete.

    A version with an alias stays, with all that it was made from: to pin one, give it an alias of your own in MLflow.
    So do younger versions, and results that a run made or used within --keep-days. Also removed: unfinished stages that
    were not resumed, with rejected rows. Records stay: lineage, show and plan say what was cleaned, and a run that
    needs it computes it again.

    ```
    rlcore gc
    rlcore gc --keep-days 90 --delete
    ```
    """
    if keep_days < 0:
        raise ConfigError("--keep-days has to be 0 or more")
    home = open_home(reads=True, asks_mlflow=True)
    if not home.is_made:
        sys.stdout.write(f"no results in {home.root}: nothing was run\n")
        return 0
    if delete:
        from rlcore.flows.flows import gc as gc_flow
        from rlcore.tasks.run.prefect_bridge import call_flow

        sys.stdout.write(call_flow(gc_flow, keep_days))
        return 0
    from rlcore.tasks.operations.garbage import look

    sys.stdout.write(look(home, keep_days=keep_days).text)
    return 0


def dump(
    *, restore: Annotated[bool, Parameter(help="Put the newest dump in the place of databases that are gone.")] = False
) -> int:
    """Dump the databases into the folder dumps of the state directory, and keep the newest few. Runs may be active.

    Then a tool such as restic can back up the state directory. With --restore no database that is there is replaced.

    ```
    rlcore dump
    rlcore dump --restore
    ```
    """
    from rlcore.tasks.operations.dump import make_dump, restore_dump
    from rlcore.tasks.tracking.database import require_made

    if restore:
        configure_logging()
        sys.stdout.write(restore_dump(find_home()))
        return 0
    home = open_home(reads=True)
    require_made(home)
    sys.stdout.write(make_dump(home))
    return 0
