"""Live view: current work of a run, with progress, speed and remaining time.

It listens to :mod:`rlcore.progress`. On a terminal it is the last lines, redrawn so that the clock advances. Elsewhere
it is a plain line now and then, if a stage has logged nothing else for long. A worker never opens one.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlcore import progress
from rlcore.progress import Progress

logger = logging.getLogger(__name__)

PLAIN_SECONDS = 30.0  # between two lines without a terminal
REDRAWS = 4.0  # of a terminal, per second
_BAR = 24  # characters
_SHARES = {"completion/truncated": "truncated", "reward/term/format": "formatted"}  # shown beside the reward


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Progress with the moment and progress from which its speed is measured."""

    progress: Progress
    began: float
    first: Progress

    def speed(self) -> list[str]:
        """Return tokens per second and the remaining time, as far as they are known."""
        now, seconds = self.progress, max(time.monotonic() - self.began, 1e-3)
        tokens = now.metrics.get("tokens", 0.0) - self.first.metrics.get("tokens", 0.0)
        rate = tokens / seconds if tokens > 0 else now.metrics.get("tokens_per_second", 0.0)
        found = [f"{rate:,.0f} tokens/s"] if rate else []
        if (gained := fraction_of(now) - fraction_of(self.first)) > 0.0:
            found.append(f"{duration(seconds / gained * (1.0 - fraction_of(now)))} left")
        return found


def fraction_of(each: Progress) -> float:
    """Return the finished fraction."""
    return each.fraction or each.done / max(each.total, 1)


class RunState(logging.Handler):
    """Current work of a run: its stage, the stage's loop, the phase of a turn, and the parts of the phase."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._stage, self._phase, self._began = "", "starting", time.monotonic()
        self._loop: Timed | None = None
        self._parts: dict[str, Timed] = {}
        self.told = time.monotonic()  # when a line was last logged

    def emit(self, record: logging.LogRecord) -> None:
        each: Progress = record.__dict__["progress"]
        if each.scope == "part":
            self._parts = {**self._parts, each.label: _continued(self._parts.get(each.label), each)}
            return
        self._phase = each.label if each.scope == "phase" else ""
        self._parts, self._began = {}, time.monotonic()
        if each.scope == "loop":
            self._loop = _continued(self._loop, each)
        elif each.scope == "stage":
            self._stage, self._loop = each.label, None
        if each.scope == "stage" or (each.scope == "loop" and each.metrics):  # which are logged
            self.told = time.monotonic()

    def rows(self) -> list[list[Text | str]]:
        """Return the cells of each line: the loop, then the running parts or the phase."""
        label = " ".join(filter(None, (self._stage, self._phase))) or "between stages"
        waiting: list[list[Text | str]] = [[Text(label, style="bold"), duration(time.monotonic() - self._began)]]
        lines = [_cells(label, each, each.progress.label) for each in self._running()] or waiting
        if not (loop := self._current_loop()):
            return lines
        metrics = loop.progress.metrics
        facts = [f"reward {metrics['reward/mean']:.3f}"] if "reward/mean" in metrics else []
        facts += [f"{words} {metrics[name]:.0%}" for name, words in _SHARES.items() if name in metrics]
        return [[*_cells(loop.progress.label, loop, ""), *facts], *lines]

    def line(self) -> str:
        """Return the newest progress as one line: of the part that runs, else the time since the phase began."""
        now = [f"{duration(time.monotonic() - self._began)} so far"]
        if running := self._running():
            now = [_counted(running[-1].progress), f"{fraction_of(running[-1].progress):.0%}", *running[-1].speed()]
        loop = self._current_loop()
        return ": ".join(filter(None, (_counted(loop.progress) if loop else self._stage, self._phase, ", ".join(now))))

    @property
    def is_idle(self) -> bool:
        """True between two stages."""
        return not (self._stage or self._phase)

    def _running(self) -> list[Timed]:
        return [each for each in self._parts.values() if each.progress.done < each.progress.total]

    def _current_loop(self) -> Timed | None:
        return self._loop if self._loop and self._loop.progress.done < self._loop.progress.total else None

    def __rich__(self) -> Table:
        table = Table.grid()
        for row in self.rows():
            table.add_row(Text("  ").join(each if isinstance(each, Text) else Text(each) for each in row))
        return table


def _continued(known: Timed | None, each: Progress) -> Timed:
    is_same = known is not None and (known.progress.label, known.progress.total) == (each.label, each.total)
    if known is None or not is_same or fraction_of(each) < fraction_of(known.progress):
        return Timed(progress=each, began=time.monotonic(), first=each)
    return Timed(progress=each, began=known.began, first=known.first)


def _counted(each: Progress) -> str:
    return f"{each.label} {each.done}/{each.total}"


def _cells(label: str, timed: Timed, unit: str) -> list[Text | str]:
    now = timed.progress
    bar = "━" * round(_BAR * fraction_of(now))
    return [Text(label, style="bold"), f"{bar:─<{_BAR}}", f"{now.done}/{now.total} {unit}".rstrip(), *timed.speed()]


@contextmanager
def live_view() -> Iterator[None]:
    """Show the view on standard error while the block runs. On a terminal other lines appear above it."""
    source, view = progress.logger, RunState()
    level, passes_on = source.level, source.propagate
    source.addHandler(view)
    source.setLevel(logging.DEBUG)
    source.propagate = False  # other handlers would log each record
    try:
        with _redrawn(view) if sys.stderr.isatty() else _plain(view):
            yield
    finally:
        source.removeHandler(view)
        source.setLevel(level)
        source.propagate = passes_on


@contextmanager
def _plain(view: RunState) -> Iterator[None]:
    """Log a line after ``PLAIN_SECONDS`` without one."""
    ended = threading.Event()

    def log_lines() -> None:
        while not ended.wait(max(view.told + PLAIN_SECONDS - time.monotonic(), 0.0)):
            if time.monotonic() >= view.told + PLAIN_SECONDS:
                view.told = time.monotonic()
                if not view.is_idle:
                    logger.info("%s", view.line())

    thread = threading.Thread(target=log_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _redrawn(view: RunState) -> Iterator[None]:
    terminal = sys.stderr
    with Live(view, console=Console(stderr=True), transient=True, refresh_per_second=REDRAWS):
        # Existing handlers hold the terminal itself; their output must go through the view.
        moved = _move_handlers(terminal, sys.stderr)
        try:
            yield
        finally:
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


def duration(seconds: float) -> str:
    """Format a duration: ``45 s``, ``3:20``, ``2:05:00``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
