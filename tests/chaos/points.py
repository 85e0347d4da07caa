"""Kills at one point of the stage runner, in every stage: what is done before it is noted, and what comes after.

A chain dies at one point alone. A stage that dies at an earlier one, too, would be mended by that attempt.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.tasks import kinds
from rlcore.tasks.kinds.kind import Lazy, Stage
from rlcore.tasks.run import pipeline as run
from rlcore.tasks.run import stages
from rlcore.tasks.run.stages import StepOutput
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.cache import StageCache

POINTS: dict[str, tuple[Any, str]] = {
    "flushed": (StepOutput, "note"),
    "noted": (ArtifactStore, "place"),
    "placed": (stages, "log_result"),
    "logged": (StageCache, "write"),
    "recorded": (stages, "close_work"),
    "closed": (run, "_publish"),
}
"""The call before which a stage dies, by what it has done."""


def step_of(stage: Stage) -> str:
    function = stage.run.func if isinstance(stage.run, partial) else stage.run
    return function.name if isinstance(function, Lazy) else f"{function.__module__}:{function.__name__}"


def kinds_of(ledger: Path) -> set[str]:
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    return {line.split(".")[3] for line in lines}


def all_kinds() -> set[str]:
    """The kinds that the project has, without benchmarks if their harness is not installed."""
    found = {path.parent.name for folder in kinds.__path__ for path in Path(folder).glob("*/stage.py")}
    return found if find_spec("lm_eval") else found - {"benchmark"}


def install(ledger: Path, point: str) -> None:
    """Let this process die at the point, in the first stage that it computes and no process has died in."""
    computed: list[str] = []

    def watched(owner: Any, name: str, before: Callable[..., None]) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def wrapper(*given: Any, **options: Any) -> Any:
            before(*given)
            return call(*given, **options)

        setattr(owner, name, wrapper)

    def die(*_: Any) -> None:
        dead = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
        if computed and computed[0] not in dead:
            with ledger.open("a", encoding="utf-8") as file:
                file.write(f"{computed[0]}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(stage: Stage, *_: Any) -> None:
        computed[:] = [step_of(stage)]

    watched(run, "run_stage", lambda *_: computed.clear())
    watched(stages, "_compute", begin)
    watched(*POINTS[point], die)
