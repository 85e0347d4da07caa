"""Report of the gate: a small frozen value that is written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.data_contracts.drift.sketches import Sketch
from rlcore.data_contracts.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """Result of one dataset rule; ``detail`` is a sentence if it is not ok."""

    name: str
    severity: str
    value: float
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """Report on one dataset.

    ``source``: a file's name, a path on the hub, or the generator. ``lines_read``: lines or rows of the source. An
    adapter may make several rows of a line, and equal rows are merged (``merged`` were removed), so ``rows_read`` =
    rows after that, plus the lines that never became rows. ``accepted`` of them passed every row rule; up to the
    requested numbers were kept (``num_train``, ``num_eval``), and the others are unused. ``digest``: SHA-256 over the
    canonical JSON of the kept rows, ``train_digest`` of those for training. ``reasons``: quarantined rows by reason.
    ``errors``: reasons to reject the dataset; empty if it passed.
    """

    contract: str
    source: str
    lines_read: int
    merged: int
    rows_read: int
    accepted: int
    quarantined: int
    num_train: int
    num_eval: int
    digest: str
    train_digest: str
    reasons: Mapping[str, int]
    rules: tuple[RuleResult, ...]
    sketches: Mapping[str, Sketch]
    errors: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.accepted + self.quarantined != self.rows_read:
            raise AssertionError(f"{self.accepted} accepted + {self.quarantined} quarantined != {self.rows_read} read")

    @property
    def passed(self) -> bool:
        """True if training may use these rows."""
        return not self.errors

    @property
    def unused(self) -> int:
        """Number of accepted rows that exceed the requested numbers."""
        return self.accepted - self.num_train - self.num_eval

    @property
    def summary(self) -> str:
        """Counts of rows as text: ``2,000 for training, 300 held out, 2,311 unused, 12 quarantined``."""
        return (
            f"{self.num_train:,} for training, {self.num_eval:,} held out, {self.unused:,} unused, "
            f"{self.quarantined:,} quarantined"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentence for each rule that warns about accepted rows."""
        return tuple(rule.detail for rule in self.rules if not rule.ok and rule.severity == "warning")

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``report.json``."""
        return {"passed": self.passed, **asdict(self)}

    def require_passed(self, *, where: str, fix: str) -> None:
        """Reject the dataset if it did not pass.

        Raises:
            ContractError: naming the first three errors.
        """
        if self.errors:
            more = f" (and {len(self.errors) - 3} more)" if len(self.errors) > 3 else ""
            raise ContractError(
                f"the dataset breaks {self.contract}: {'; '.join(self.errors[:3])}{more}", where=where, fix=fix
            )
