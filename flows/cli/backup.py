"""Commands that back up a state directory and restore it."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from rlcore.flows.cli.parameters import open_home
from rlcore.tasks.store.settings import configure_logging, find_home, use_inline_engine

Target = Annotated[str, Parameter(help="Folder on another disk, or a URL of fsspec: s3://bucket/rlcore.")]


def backup(
    target: Target, /, *, keep: Annotated[int, Parameter(help="Number of backups to keep; 0 keeps all.")] = 0
) -> int:
    """Back up the state directory: databases, audit log, results, models. Runs may be active.

    A file that the target has is not copied again, and each backup can be restored by itself. Passwords are in no
    backup. Use one target for one state directory.

    ```
    rlcore backup /mnt/backups/rlcore --keep 30
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.operations.backup import back_up, describe
    from rlcore.tasks.tracking.database import require_made

    require_made(home)
    use_inline_engine()  # no server is needed
    sys.stdout.write(describe(back_up(home, target, keep=keep)))
    return 0


def restore(
    target: Target,
    /,
    *,
    at: Annotated[str, Parameter(help="Name of a backup, as `rlcore backup` prints it; default: the newest.")] = "",
) -> int:
    """Restore a backup into an empty state directory, and verify the digest of every file.

    A damaged backup is refused, and its damaged files are named. After a kill, run the same command again.

    ```
    RLCORE_HOME=/srv/rlcore rlcore restore /mnt/backups/rlcore
    ```
    """
    home = find_home()
    configure_logging()
    from rlcore.tasks.operations.restore import describe
    from rlcore.tasks.operations.restore import restore as restore_backup

    sys.stdout.write(describe(home, restore_backup(home, target, at)))
    return 0
