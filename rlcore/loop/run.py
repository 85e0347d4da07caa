"""One run under way: its parts, which stay as they are, and how far it is, which changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.canaries import Baseline
from rlcore.loop.ahead import RolloutsAhead
from rlcore.loop.checkpoints import Checkpoints
from rlcore.loop.parts import Parts
from rlcore.loop.recorder import Recorder, Stop


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """``done`` iterations are over; ``history`` has the metrics of each, with its number under ``iteration``.

    ``baselines``: what each engine showed before any update. ``findings`` of the health rules, as they came up, each
    with its iteration. ``stop``: what ended the run early.
    """

    parts: Parts
    recorder: Recorder
    checkpoints: Checkpoints
    ahead: RolloutsAhead
    baselines: tuple[Baseline, ...]
    done: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def is_over(self) -> bool:
        """Whether every iteration is done, or a health rule ended the run."""
        return self.stop is not None or self.done == self.parts.config.num_iterations

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the learner, JSON-able; the iteration is kept by the checkpoint itself."""
        return {"history": self.history, "ahead": self.ahead.state(), "findings": self.findings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; the learner has been restored already."""
        self.done = int(state["iteration"])
        self.history, self.findings = list(state["history"]), list(state["findings"])
        self.ahead.restore(state["ahead"], self.parts.prompts_of(self.done + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run measured; the trained policy is the learner's.

    ``history``: the metrics of each iteration up to the one whose weights the learner holds. ``dropped``: of those
    after it, where a health rule ended the run.
    """

    history: tuple[Mapping[str, float], ...]
    findings: tuple[Mapping[str, Any], ...]
    stop: Stop | None
    dropped: tuple[Mapping[str, float], ...]
