"""Errors of contracts. This package imports nothing else of rlcore, and therefore has its own error."""

from __future__ import annotations


class ContractError(Exception):
    """Error of a file, a dataset or a frame that breaks its contract.

    Args:
        what: One sentence with the problem and the offending value.
        where: File, line, row or field; empty if there is none.
        fix: Action for the user; empty if it is obvious from ``what``.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        # All three go to args so that the exception survives pickling across processes.
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.what, self.where, self.fix))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def _rebuild(what: str, where: str, fix: str) -> ContractError:
    return ContractError(what, where=where, fix=fix)


class RowError(Exception):
    """Error of a row that cannot become contract columns.

    Args:
        field: The invalid field, ``messages.0.content`` for a nested one.
        reason: The problem.
        value: The field's value, for the excerpt.
    """

    def __init__(self, field: str, reason: str, value: object = "") -> None:
        super().__init__(field, reason, value)
        self.field, self.reason, self.value = field, reason, value


class RowValueError(RowError):
    """Error of a row whose columns and types are right: it says nothing about the layout of its file."""


LEFT_OUT = "left out: "
"""Beginning of the reasons of rows that say nothing, such as ties: they are listed, and count against no limit."""


class LeftOutError(RowValueError):
    """Error of a sound row from which nothing follows: a tie, a single answer to a prompt."""

    def __init__(self, field: str, reason: str, value: object = "") -> None:
        super().__init__(field, reason if reason.startswith(LEFT_OUT) else LEFT_OUT + reason, value)
