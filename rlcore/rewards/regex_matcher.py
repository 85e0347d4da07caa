"""A user's regular expression. Runs in a grader process: backtracking may take exponential time."""

from __future__ import annotations

import re
from typing import Any


def warm_up() -> None:
    """Nothing to load."""


def grade(request: dict[str, Any]) -> bool:
    """Whether the whole of ``text`` without outer blanks matches ``pattern`` (flags inside it: ``(?s)``)."""
    return re.fullmatch(request["pattern"], request["text"].strip()) is not None
