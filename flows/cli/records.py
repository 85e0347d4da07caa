"""Commands about rows: where they are, and their erasure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlcore.flows.cli.parameters import open_home

_ROWS = 'Rows as a dataset has them, or {"prompt": "…"} or {"id": "…"} a line: .jsonl, .json, .parquet or .csv.'
RowFile = Annotated[Path, Parameter(help=_ROWS)]


def rows(file: RowFile, /) -> int:
    """Show which dataset snapshots hold rows, and which registered models descend from them.

    Two rows are the same if their prompts are, without case, blanks and system prompts; answers do not count. The exit
    code is 1 if no snapshot holds one.

    ```
    rlcore rows request.jsonl
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.operations.rows import find_holdings, lines_about, registered_versions
    from rlcore.tasks.operations.wanted_rows import read_wanted
    from rlcore.tasks.tracking.lineage import read_records
    from rlcore.tasks.tracking.runs import open_tracker

    tracker, records = open_tracker(home), read_records(home)
    wanted = read_wanted(file, records)
    holdings = find_holdings(home, records, wanted, registered_versions(tracker))
    sys.stdout.write("\n".join(lines_about(wanted, holdings)) + "\n")
    return 0 if holdings else 1


def erase(
    file: RowFile,
    /,
    *,
    reason: Annotated[str, Parameter(help="The reason, such as the number of a request, for the certificate.")],
    delete: Annotated[bool, Parameter(help="Delete what the command otherwise only lists.")] = False,
    key: Annotated[
        Path | None, Parameter(help="Private ssh key that signs the certificate.", show_default=False)
    ] = None,
) -> int:
    """List every copy of rows in the state directory; with --delete, remove the copies and keep the rows out.

    The data gate drops the rows from then on. Models that were trained on them are named, and unchanged. A repeated
    command completes one that was killed.

    ```
    rlcore erase request.jsonl --reason "request 17"
    rlcore erase request.jsonl --reason "request 17" --delete --key ~/.ssh/id_ed25519
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.operations.certificate import erase as erase_rows
    from rlcore.tasks.operations.certificate import find, summary

    if not delete:
        found = find(home, file)
        sys.stdout.write("\n".join(summary(found)) + "\nnothing was deleted: repeat the command with --delete\n")
        return 0
    certificate = erase_rows(home, file, reason=reason, key=key)
    sys.stdout.write(certificate.with_suffix(".md").read_text(encoding="utf-8") + f"\ncertificate: {certificate}\n")
    return 0
