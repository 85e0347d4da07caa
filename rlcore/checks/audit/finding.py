"""Findings of an audit: a difference, with what was expected, what was found, and where."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import ScoredRollout

_FIX = "what is trained on is not what was sampled and scored; nothing of this iteration has been learned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discrepancy:
    """A difference. ``expected`` and ``found`` are empty where ``what`` says all; ``item``: the rollout it is of."""

    summary: str
    expected: str = ""
    actual: str = ""
    rollout: ScoredRollout | None = None
    fix: str = _FIX

    def __str__(self) -> str:
        return f"{self.summary}: expected {self.expected}, found {self.actual}" if self.expected else self.summary

    @property
    def where(self) -> str:
        """The rollout in words."""
        if self.rollout is None:
            return ""
        rollout = self.rollout.rollout
        return f"rollout of prompt {rollout.prompt.prompt_id!r}: {rollout.text[:120]!r}"
