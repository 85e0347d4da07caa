"""Live view: progress, speed, reward and remaining time in the last lines of a terminal.

The loops call ``report_progress``, which logs a record that no other handler takes. Without a terminal there is no view
and the plain lines are unchanged; a worker never opens one.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlcore.tasks.pipeline.prefect_bridge import PROGRESS_LOGGER, Progress

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 24  # characters of a sparkline
_BAR = 24
_SHARES = {"completion/truncated": "truncated", "reward/term/format": "formatted"}  # shown beside the reward


class LiveView(logging.Handler):
    """Progress of the running loop, redrawn at each refresh, so that the clock advances."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._shown: Progress | None = None
        self._rewards: list[float] = []
        self._started = self._first_done = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        progress: Progress = record.__dict__["progress"]
        if self._shown is None or self._shown.label != progress.label or progress.done <= self._shown.done:
            # The time of the first iteration is unknown: speed is measured from its end.
            self._rewards, self._started, self._first_done = [], time.monotonic(), progress.done
        self._shown = progress
        if "reward/mean" in progress.metrics:
            self._rewards.append(progress.metrics["reward/mean"])

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        if self._shown is None or self._shown.done >= self._shown.total:
            return table
        shown, metrics = self._shown, self._shown.metrics
        seconds, turns = time.monotonic() - self._started, shown.done - self._first_done
        cells: list[Text | str] = [
            Text(shown.label, style="bold"),
            Text(bar(shown.done, shown.total)),
            f"{shown.done}/{shown.total}",
        ]
        if "reward/mean" in metrics:
            cells += [Text(sparkline(self._rewards), style="cyan"), f"reward {metrics['reward/mean']:.3f}"]
        cells += [f"{words} {metrics[name]:.0%}" for name, words in _SHARES.items() if name in metrics]
        if "tokens_per_second" in metrics:
            cells.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        cells.append(f"{duration(seconds / turns * (shown.total - shown.done))} left" if turns else "")
        table.add_row(*cells)
        return table


@contextmanager
def live_view() -> Iterator[None]:
    """Show the view on standard error while the block runs, if that is a terminal. Other lines appear above it."""
    if not sys.stderr.isatty():
        yield
        return
    view, logger = LiveView(), logging.getLogger(PROGRESS_LOGGER)
    level, terminal = logger.level, sys.stderr
    with Live(view, console=Console(stderr=True), transient=True, refresh_per_second=4):
        # Existing handlers hold the terminal itself; their output must go through the view.
        moved = _move_handlers(terminal, sys.stderr)
        logger.addHandler(view)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.removeHandler(view)
            logger.setLevel(level)
            for handler in moved:
                _point(handler, terminal)


def _move_handlers(old: TextIO, new: TextIO) -> list[logging.StreamHandler[TextIO]]:
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    handlers = {handler for logger in (logging.root, *known) for handler in logger.handlers}
    moved = [each for each in handlers if isinstance(each, logging.StreamHandler) and each.stream is old]
    for handler in moved:
        _point(handler, new)
    return moved


def _point(handler: logging.StreamHandler[TextIO], stream: TextIO) -> None:
    handler.setStream(stream)
    console = getattr(handler, "console", None)  # Prefect's handler writes through one
    if isinstance(console, Console):
        console.file = stream


def sparkline(values: Sequence[float]) -> str:
    """Return a sparkline of the last values in eight heights, scaled from their minimum to their maximum.

    ``sparkline([0, 1, 2])`` is ``▁▅█``: 1 is half way, 0.5 * 7 = 3.5, rounded to the even block 4.
    """
    last = list(values)[-_SPARKS:]
    if not last:
        return ""
    low, span = min(last), max(last) - min(last)
    return "".join(_BLOCKS[round((value - low) / span * 7)] if span else _BLOCKS[0] for value in last)


def bar(done: int, total: int) -> str:
    """Return a bar of fixed width."""
    full = round(_BAR * done / max(total, 1))
    return "━" * full + "─" * (_BAR - full)


def duration(seconds: float) -> str:
    """Format a duration: ``45 s``, ``3:20``, ``2:05:00``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
