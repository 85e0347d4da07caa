"""Program that calls an agent function with its task: ``python call.py module:function``; it knows no rlcore."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from pathlib import Path

TASK_FILE = "task.json"
"""File of the working folder with the task, as in the environment variable RLCORE_TASK."""


def main(name: str) -> None:
    """Call ``module:function``, plain or ``async``, with the task of the current folder; ignore its result."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    outcome = found(json.loads(Path(TASK_FILE).read_text(encoding="utf-8")))
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)


if __name__ == "__main__":
    main(sys.argv[1])
