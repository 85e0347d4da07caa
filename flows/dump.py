"""Flow: dump of the databases of the state directory."""

from __future__ import annotations

from prefect import flow

from rlcore.tasks.operations.dump import make_dump
from rlcore.tasks.pipeline.prefect_bridge import report_markdown
from rlcore.tasks.store.settings import configure_environment, configure_logging, find_home


@flow(name="dump", persist_result=False)
def dump() -> str:
    """Dump the databases of the worker's state directory into its folder dumps, and keep the newest few."""
    home = find_home()
    configure_environment(home)
    configure_logging()
    text = make_dump(home)
    report_markdown("dump", text)
    return text
