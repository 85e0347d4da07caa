"""Live view: current work of a run, with progress, speed and remaining time.

It listens to :mod:`rlcore.progress`. On a terminal it is the last lines, redrawn so that the clock advances. Elsewhere
it is a plain line now and then, if a stage has logged nothing else for long. A worker never opens one.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
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
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 24  # characters of a sparkline
_BAR = 24
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
        self._rewards: list[float] = []
        self._parts: dict[str, Timed] = {}

    def emit(self, record: logging.LogRecord) -> None:
        each: Progress = record.__dict__["progress"]
        if each.scope == "part":
            self._parts = {**self._parts, each.label: _continued(self._parts.get(each.label), each)}
        elif each.scope == "loop":
            self._loop, self._phase, self._parts = _continued(self._loop, each), "", {}
            self._began = time.monotonic()
            if each.done <= 1:
                self._rewards = []
            if "reward/mean" in each.metrics:
                self._rewards.append(each.metrics["reward/mean"])
        else:
            self._phase, self._parts, self._began = each.label, {}, time.monotonic()
            if each.scope == "stage":
                self._stage, self._phase, self._loop = each.label, "", None

    def rows(self) -> list[list[Text | str]]:
        """Return the cells of each line: the loop, then the running parts or the phase."""
        running = [each for each in self._parts.values() if each.progress.done < each.progress.total]
        label = " ".join(filter(None, (self._stage, self._phase))) or "between stages"
        waiting: list[list[Text | str]] = [[Text(label, style="bold"), duration(time.monotonic() - self._began)]]
        lines = [_cells(label, each, each.progress.label) for each in running] or waiting
        return [self._loop_cells(), *lines] if self._is_looping else lines

    def line(self) -> str:
        """Return the newest progress as one line: of the part that runs, else the time since the phase began."""
        running = [each for each in self._parts.values() if each.progress.done < each.progress.total]
        now = [f"{duration(time.monotonic() - self._began)} so far"]
        if running:
            now = [_counted(running[-1].progress), f"{fraction_of(running[-1].progress):.0%}", *running[-1].speed()]
        loop = _counted(self._loop.progress) if self._loop and self._is_looping else ""
        return ": ".join(filter(None, (loop or self._stage, self._phase, ", ".join(now))))

    @property
    def is_idle(self) -> bool:
        """True between two stages."""
        return not (self._stage or self._phase)

    @property
    def _is_looping(self) -> bool:
        return self._loop is not None and self._loop.progress.done < self._loop.progress.total

    def _loop_cells(self) -> list[Text | str]:
        assert self._loop is not None
        now, metrics = self._loop.progress, self._loop.progress.metrics
        cells = _cells(now.label, self._loop, "")
        if "reward/mean" in metrics:
            cells[3:3] = [Text(sparkline(self._rewards), style="cyan"), f"reward {metrics['reward/mean']:.3f}"]
        return cells + [f"{words} {metrics[name]:.0%}" for name, words in _SHARES.items() if name in metrics]

    def __rich__(self) -> Table:
        table = Table.grid()
        for row in self.rows():
            table.add_row(Text("  ").join(each if isinstance(each, Text) else Text(each) for each in row))
        return table


class PlainLines(RunState):
    """View without a terminal: a line after ``PLAIN_SECONDS`` without one."""

    def __init__(self) -> None:
        super().__init__()
        self._logged, self._ended = time.monotonic(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        each: Progress = record.__dict__["progress"]
        if each.scope == "stage" or (each.scope == "loop" and each.metrics):  # which are logged
            self._logged = time.monotonic()

    @contextmanager
    def logged(self) -> Iterator[None]:
        thread = threading.Thread(target=self._log_lines, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _log_lines(self) -> None:
        while not self._ended.wait(max(self._logged + PLAIN_SECONDS - time.monotonic(), 0.0)):
            if time.monotonic() >= self._logged + PLAIN_SECONDS:
                self._logged = time.monotonic()
                if not self.is_idle:
                    logger.info("%s", self.line())


def _continued(known: Timed | None, each: Progress) -> Timed:
    is_same = known is not None and (known.progress.label, known.progress.total) == (each.label, each.total)
    if known is None or not is_same or fraction_of(each) < fraction_of(known.progress):
        return Timed(progress=each, began=time.monotonic(), first=each)
    return Timed(progress=each, began=known.began, first=known.first)


def _counted(each: Progress) -> str:
    return f"{each.label} {each.done}/{each.total}"


def _cells(label: str, timed: Timed, unit: str) -> list[Text | str]:
    now = timed.progress
    counted = f"{now.done}/{now.total} {unit}".rstrip()
    return [Text(label, style="bold"), bar(fraction_of(now), 1), counted, *timed.speed()]


@contextmanager
def live_view() -> Iterator[None]:
    """Show the view on standard error while the block runs. On a terminal other lines appear above it."""
    source, plain = progress.logger, PlainLines()
    level, passes_on = source.level, source.propagate
    view = RunState() if sys.stderr.isatty() else plain
    source.addHandler(view)
    source.setLevel(logging.DEBUG)
    source.propagate = False  # other handlers would log each record
    try:
        with plain.logged() if view is plain else _redrawn(view):
            yield
    finally:
        source.removeHandler(view)
        source.setLevel(level)
        source.propagate = passes_on


@contextmanager
def _redrawn(view: RunState) -> Iterator[None]:
    terminal = sys.stderr
    with Live(view, console=Console(stderr=True), transient=True, refresh_per_second=4):
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


def sparkline(values: Sequence[float]) -> str:
    """Return a sparkline of the last values in eight heights, scaled from their minimum to their maximum.

    ``sparkline([0, 1, 2])`` is ``▁▅█``: half of 7 is 3.5, rounded to the even 4.
    """
    last = list(values)[-_SPARKS:]
    if not last:
        return ""
    low, span = min(last), max(last) - min(last)
    return "".join(_BLOCKS[round((value - low) / span * 7)] if span else _BLOCKS[0] for value in last)


def bar(done: float, total: float) -> str:
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
