"""Progress of long loops, as records of the logger ``rlcore.progress``: without a listener they cost nothing.

A listener adds a handler and sets the level to ``DEBUG``; ``record.progress`` is a :class:`Progress`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)
Scope = Literal["stage", "loop", "phase", "part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """``done`` of ``total`` of ``label``.

    A ``stage`` has one ``loop``, such as iterations; its turns have phases, such as an update, with parts, such as
    answers. Stages and phases have ``total`` 0. ``fraction``: counts unfinished units too. ``metrics``: of the last
    turn, or ``tokens`` so far.
    """

    scope: Scope
    label: str
    done: int = 0
    total: int = 0
    fraction: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


def show(progress: Progress) -> None:
    """Give progress to the listeners."""
    logger.debug("%s: %d of %d", progress.label, progress.done, progress.total, extra={"progress": progress})


def begin(label: str, *, scope: Scope = "phase") -> None:
    """Report the begin of a stage or phase."""
    show(Progress(scope=scope, label=label))


def end_stage() -> None:
    """Report that a stage has ended."""
    show(Progress(scope="stage", label=""))


def advance(label: str, done: int, total: int, *, fraction: float | None = None, tokens: int = 0) -> None:
    """Report that ``done`` of ``total`` are finished within the current phase."""
    if logger.isEnabledFor(logging.DEBUG):
        finished = done / max(total, 1) if fraction is None else fraction
        metrics = {"tokens": float(tokens)} if tokens else {}
        show(Progress(scope="part", label=label, done=done, total=total, fraction=finished, metrics=metrics))
