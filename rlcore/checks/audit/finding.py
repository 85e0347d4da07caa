"""Findings of an audit: a difference, with what was expected, what was found, and where."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import ScoredRollout

_FIX = "what is trained on is not what was sampled and scored; nothing of this iteration has been learned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A difference. ``expected`` and ``found`` are empty where ``what`` says all; ``item``: the rollout it is of."""

    what: str
    expected: str = ""
    found: str = ""
    item: ScoredRollout | None = None
    fix: str = _FIX

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}" if self.expected else self.what

    @property
    def where(self) -> str:
        """The rollout in words."""
        if self.item is None:
            return ""
        rollout = self.item.rollout
        return f"rollout of prompt {rollout.prompt.prompt_id!r}: {rollout.text[:120]!r}"
