"""Sides of the comparison with TRL in this process, with work that only one side gets."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.peers.__main__ import run_side
from benchmarks.peers.compare import Comparison
from benchmarks.peers.work import Work

PLANTS: dict[str, Mapping[str, Any]] = {
    "token ids": {"prompt_tokens": (7, 12)},
    "updates": {"steps": 1},
    "products of updates": {"dtype": "bfloat16"},
    "trained tokens": {"completion_tokens": (4, 15)},
}


def small_work(task: str, **settings: Any) -> Work:
    """Two steps on the smallest shape."""
    group = {"sft": 1, "rm": 2, "dpo": 2}.get(task, 4)
    sizes = {"num_prompts": 8 if group < 4 else 2, "prompt_tokens": (6, 12), "completion_tokens": (4, 16), "steps": 2}
    return Work(task=task, shape="micro", group_size=group, **(sizes | settings))


def small_comparison(work: Work) -> Comparison:
    """Two candidates a side, one round."""
    trial = replace(work, steps=1)
    return Comparison(title=work.task, work=work, trial=trial, rounds=1, tokens=(64, 512), rows=(4, 8))


def runner(sides: Mapping[str, str], planted: Mapping[str, Any]) -> Callable[..., Mapping[str, Any]]:
    """A stand-in for ``compare.run_arm``; ``planted`` are fields of the work that only the side ``trl`` gets."""

    def run(arguments: Sequence[str], *, threads: int, timeout: float | None = None) -> Mapping[str, Any]:
        _, _, side, work, setting = arguments
        given = json.loads(work) | (planted if side == "trl" else {})
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                run_side(sides[side], json.dumps(given), setting)
        except Exception as error:  # noqa: BLE001 - as a process that fails
            return {"failed": f"{type(error).__name__}: {error}"}
        found: Mapping[str, Any] = json.loads(output.getvalue().splitlines()[-1])
        return found

    return run
