"""Text of a garbage collection: a table of what goes, totals, and what stays."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from rlcore.tasks.operations.garbage import Collection
from rlcore.tasks.operations.garbage_roots import USED

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table_text(collection: Collection) -> str:
    """Return the table, for a terminal or a page."""
    return "\n".join(_lines(collection)) + "\n"


def _lines(collection: Collection) -> Iterator[str]:
    day = _day(collection.before)
    verb = "was removed" if collection.is_removed else "would be removed"
    if not collection.lines:
        yield f"nothing that is older than {day} can go"
    else:
        yield f"{f'what {verb}':<28}{'count':>7}{'size':>12}  {'oldest':<10}  why"
        for line in collection.lines:
            yield f"{line.kind:<28}{line.count:>7}{size_text(line.bytes):>12}  {_day(line.oldest)}  {line.reason}"
        count, size = (sum(getattr(line, name) for line in collection.lines) for name in ("count", "bytes"))
        yield f"{'total':<28}{count:>7}{size_text(size):>12}"
    for reason, number in sorted(collection.kept.items()):
        yield f"{'stays':<28}{number:>7}  results {reason}{f' {day}' if reason == USED else ''}"
    if collection.active:
        yield f"{collection.active} runs are active: only results and pages of before the oldest of them can go"
    if collection.lines and not collection.is_removed:
        yield "nothing was removed; to remove it: the same command with --delete"


def size_text(size: float) -> str:
    """Format bytes with a unit: ``1.5 MiB``."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"
