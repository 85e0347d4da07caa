"""Discrepancy: a difference between a run and its recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import ScoredRollout

_FIX = "training data differ from what was sampled and scored; this iteration was not trained"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discrepancy:
    """A difference. ``expected`` and ``actual`` are empty if ``summary`` is complete."""

    summary: str
    expected: str = ""
    actual: str = ""
    rollout: ScoredRollout | None = None
    fix: str = _FIX

    def __str__(self) -> str:
        return f"{self.summary}: expected {self.expected}, found {self.actual}" if self.expected else self.summary

    @property
    def where(self) -> str:
        """Description of the rollout, or ""."""
        if self.rollout is None:
            return ""
        rollout = self.rollout.rollout
        return f"rollout of prompt {rollout.prompt.prompt_id!r}: {rollout.text[:120]!r}"
