"""Stages of the tiny preset by name, and which modules' functions each of them calls: for the warm process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from rlcore.flows.run import run_targets
from rlcore.tasks.keys.cache_keys import function_of
from rlcore.tasks.run import stages
from rlcore.tasks.store.settings import configure_environment, find_home

CALL = "tests.flows.watched:main"


def main(arguments: Sequence[str]) -> int:
    """Run the stages ``names`` with ``overrides``; write the modules that each of ``names`` called to ``file``.

    ``arguments``: overrides and names as JSON, and the file. Only the step is looked at: the pipeline plans memory,
    among others.
    """
    overrides, names, file = json.loads(arguments[0]), json.loads(arguments[1]), Path(arguments[2])
    called: dict[str, set[str]] = {name: set() for name in names}
    run_step = stages._run_step

    def watched(stage: stages.Stage, *given: Any) -> Any:
        def look(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name != "<module>":
                called[stage.name].add(frame.f_globals.get("__name__", ""))

        if stage.name not in called:
            return run_step(stage, *given)
        import_module(function_of(stage.run)[0])  # an import calls functions too
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            return run_step(stage, *given)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    stages._run_step = watched
    configure_environment(find_home())
    run_targets("tiny", overrides, names)
    file.write_text(json.dumps({name: sorted(modules) for name, modules in called.items()}), encoding="utf-8")
    return 0
