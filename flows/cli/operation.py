"""Commands of operation: decisions of people, audit log, what is kept, dumps, upgrades."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import open_home
from rlcore.tasks.store.settings import configure_logging, find_home

Version = Annotated[str, Parameter(help="A registered version that awaits a decision: tiny-grpo/4.")]
Reason = Annotated[str, Parameter(help="The reason, for the audit log.")]
Key = Annotated[Path, Parameter(help="Your private ssh key, or the .pub file of a key that the agent has.")]
_KEY = Path("~/.ssh/id_ed25519")


def approve(version: Version, /, *, reason: Reason, key: Key = _KEY) -> int:
    """Sign the approval of a version that passed the promotion gate: it becomes champion.

    ```
    rlcore approve tiny-grpo/4 --reason "read 50 answers, none is rude"
    ```
    """
    return _decide("approve", version, reason, key)


def reject(version: Version, /, *, reason: Reason, key: Key = _KEY) -> int:
    """Sign the rejection of a version that passed the promotion gate. It is final until there is a new verdict.

    ```
    rlcore reject tiny-grpo/4 --reason "answers in the wrong language"
    ```
    """
    return _decide("reject", version, reason, key)


def _decide(decision: Literal["approve", "reject"], version: str, reason: str, key: Path) -> int:
    home = open_home(reads=True)
    from rlcore.tasks.promotion.approvers import sign
    from rlcore.tasks.promotion.promotion import statement

    document = statement(home, version, decision, reason)  # reject unknown versions before anything starts
    signature = sign(document, key.expanduser())
    from rlcore.flows.flows import approve as approve_flow
    from rlcore.flows.flows import reject as reject_flow
    from rlcore.tasks.run.prefect_bridge import call_flow

    flow = approve_flow if decision == "approve" else reject_flow
    sys.stdout.write(call_flow(flow, version, document, signature) + "\n")
    return 0


def audit(
    action: Annotated[Literal["show", "verify"], Parameter(help="Print the entries, or look for errors.")] = "show",
    subject: Annotated[str, Parameter(help="With show: a registered model or version; default: everything.")] = "",
    /,
) -> int:
    """Show the audit log, or verify it: an edited or missing entry, a signature, an alias that nobody moved.

    The exit code of `verify` is 1 if there are errors. It compares the log with the model registry and
    its champions' files.

    ```
    rlcore audit show tiny-grpo
    rlcore audit verify
    ```
    """
    home = open_home(reads=True, asks_mlflow=action == "verify")
    from rlcore.tasks.operations.audit import audit_errors, audit_table, file_errors

    if action == "show":
        sys.stdout.write(audit_table(home, subject))
        return 0
    errors, count = audit_errors(home)
    errors += file_errors(home)
    sys.stdout.write("".join(f"{error}\n" for error in errors) or f"{count} entries, no errors\n")
    return 1 if errors else 0


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
    home = open_home(reads=True, asks_mlflow=not delete)
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
