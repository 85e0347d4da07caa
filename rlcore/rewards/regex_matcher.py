"""Matcher of a user's regular expression. Runs in a grader process, since backtracking may take exponential time."""

from __future__ import annotations

import re
from typing import Any


def warm_up() -> None:
    """Load nothing."""


def grade(request: dict[str, Any]) -> bool:
    """Return True if the whole stripped ``text`` matches ``pattern`` (flags inside it: ``(?s)``)."""
    return re.fullmatch(request["pattern"], request["text"].strip()) is not None
