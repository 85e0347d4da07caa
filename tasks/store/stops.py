"""Stops that are no failures: a later attempt continues the run."""

from __future__ import annotations

from rlcore.errors import RlcoreError


class BudgetReachedError(RlcoreError):
    """A limit of the preset's section ``budget`` is reached; the same command with a higher one resumes."""


def is_continued(error: BaseException) -> bool:
    """Return True if an error is no failure of the run: a kill, an interruption, a reached budget."""
    return isinstance(error, BudgetReachedError) or not isinstance(error, Exception)
