"""Summaries of rows for a report: enough to find and recognize a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate.records import Origin

_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSummary:
    """Row, or a prompt of another dataset, which has no ``origin``."""

    origin: Origin | None
    name: str
    prompt: str
    reference: str = ""
    set_name: str = ""

    @property
    def place(self) -> str:
        """Location in the source: ``line 7``."""
        if self.origin is None:
            return "another dataset"
        return f"{self.origin.source}, line {self.origin.line}" if self.origin.source else f"line {self.origin.line}"


RowSummaries = Mapping[int, RowSummary]


def summarize_row(row: Mapping[str, Any], origin: Origin, contract: Contract) -> RowSummary:
    """Summarize a row in contract columns."""
    return RowSummary(
        origin=origin,
        name=row[contract.id_column][:_CHARACTERS],
        prompt=prompt_of(row["messages"]),
        reference=str(row.get("reference", ""))[:_CHARACTERS],
        set_name=str(row.get("set_id", ""))[:_CHARACTERS],
    )


def summarize_foreign(messages: Messages) -> RowSummary:
    """Summarize an evaluation prompt of another dataset."""
    return RowSummary(origin=None, name="", prompt=prompt_of(messages))


def prompt_of(messages: Messages) -> str:
    """Return the beginning of the last message."""
    return messages[-1]["content"][:_CHARACTERS]
