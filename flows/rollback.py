"""Flow: rollback of a champion."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import Field

from rlcore.flows.run import run_rollback


@flow(name="rollback", flow_run_name="rollback {model} {version}", persist_result=False)
def rollback(
    model: Annotated[str, Field(min_length=1)],
    version: Annotated[int, Field(ge=1)],
    reason: Annotated[str, Field(min_length=1)],
) -> str:
    """Make the previous champion of ``model`` champion again; ``version`` must be the present one.

    Args:
        model: Name of the registered model, such as tiny-grpo.
        version: The version to roll back, which must be the champion.
        reason: The reason, for the version's tags.
    """
    return run_rollback(model, version, reason)
