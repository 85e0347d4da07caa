"""What a contract says no with. This package knows no other of ours, so it has an error of its own."""

from __future__ import annotations


class ContractError(Exception):
    """A file, a dataset or a frame breaks its contract.

    Args:
        what: one sentence: what is wrong, with the offending value.
        where: file, line, row or field; empty when there is none.
        fix: what the user should do; empty when it is obvious from ``what``.
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


class RowFault(Exception):  # noqa: N818 - not an error of the program: it sends one row to the quarantine
    """One row cannot become contract columns.

    Args:
        field: the field at fault, ``messages.0.content`` for a nested one.
        reason: what is wrong with it.
        value: what stands there, for the excerpt.
    """

    def __init__(self, field: str, reason: str, value: object = "") -> None:
        super().__init__(field, reason, value)
        self.field, self.reason, self.value = field, reason, value
