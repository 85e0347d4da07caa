"""Flow: backup of the state directory."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import Field

from rlcore.tasks.operations.backup import back_up, describe
from rlcore.tasks.pipeline.prefect_bridge import report_markdown
from rlcore.tasks.store.settings import configure_environment, configure_logging, find_home


@flow(name="backup", flow_run_name="backup {target}", persist_result=False)
def backup(target: Annotated[str, Field(min_length=1)], keep: Annotated[int, Field(ge=0)] = 0) -> str:
    """Back up the state directory of the worker.

    Args:
        target: Folder on another disk, or a URL such as s3://bucket/rlcore.
        keep: Number of backups to keep; 0 keeps all.
    """
    home = find_home()
    configure_environment(home)
    configure_logging()
    text = describe(back_up(home, target, keep=keep))
    report_markdown("backup", text)
    return text
