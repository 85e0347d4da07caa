"""Commands by which people decide on versions, and show and verify who did what."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlcore.flows.cli.parameters import open_home

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
