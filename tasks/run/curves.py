"""Curves of a stage in the tools that the preset names besides MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from rlcore.tasks.presets.run import RunConfig
    from rlcore.tasks.tracking.runs import RunTracker


@contextmanager
def open_curves(config: RunConfig, home: Home, stage: str, tracker: RunTracker) -> Iterator[None]:
    """Let the stage's tracker write to the tools, which continue the curves of a killed attempt.

    Raises:
        ConfigError: a tool cannot be used.
    """
    wanted = config.tracking.also
    if not wanted:
        yield
        return
    from rlcore.loop.curves import TOOLS, Tools

    name = f"{stage}-{tracker.run_id[:8]}"
    with ExitStack() as stack:
        opened = (TOOLS[each](home.root / each, project=config.name, run=name) for each in wanted)
        tracker.also = Tools([stack.enter_context(closing(each)) for each in opened])
        try:
            yield
        finally:
            tracker.also = None
