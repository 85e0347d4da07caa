"""Flow: a person's signed approval of a version."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Document, Signature, Version
from rlcore.flows.run import run_signed


@flow(name="approve", flow_run_name="approve {version}", persist_result=False)
def approve(version: Version, document: Document, signature: Signature) -> str:
    """Approve a version that awaits a person's decision: it becomes champion.

    Args:
        version: The version that awaits a decision, such as tiny-grpo/4.
        document: The signed line of JSON. The run that asked for the decision shows it.
        signature: The output of ssh-keygen -Y sign -n rlcore for that line, by a key among the approvers.
    """
    return run_signed(version, decision="approve", document=document, signature=signature)
