"""Audit: recompute sampled rollouts from text to gradient by a slow path.

Nothing here computes a result: a check only stops a run or logs a message. Therefore no cache key counts this folder
(``tasks/store/code_hash.py``), and the history of a run has no metric of it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from rlcore.types import ScoredRollout

_FIX = "training data differ from what was sampled and scored; this iteration was not trained"


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A difference between a run and its recomputation. Only ``summary`` is needed if it says all."""

    summary: str
    expected: str | int = ""
    actual: str | int = ""
    _: KW_ONLY
    rollout: ScoredRollout | None = None
    fix: str = _FIX

    def __str__(self) -> str:
        if self.expected == "":
            return self.summary
        return f"{self.summary}: expected {self.expected}, found {self.actual}"

    @property
    def where(self) -> str:
        """Description of the rollout, or ""."""
        if self.rollout is None:
            return ""
        rollout = self.rollout.rollout
        return f"rollout of prompt {rollout.prompt.prompt_id!r}: {rollout.text[:120]!r}"
