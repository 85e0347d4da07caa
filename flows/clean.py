"""Flow: garbage collection of the state directory."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import Field

from rlcore.tasks.operations.garbage import collect
from rlcore.tasks.pipeline.prefect_bridge import report_markdown
from rlcore.tasks.store.settings import configure_environment, configure_logging, find_home


@flow(name="gc", flow_run_name="gc older than {keep_days} days", persist_result=False)
def gc(keep_days: Annotated[int, Field(ge=0)] = 30) -> str:
    """Remove what no registered version, run or preset needs; the records of what goes stay.

    Args:
        keep_days: Age in days from which something can go.
    """
    home = find_home()
    configure_environment(home)
    configure_logging()
    text = collect(home, keep_days=keep_days).text
    report_markdown("what was cleaned", f"```text\n{text}```")
    return text
