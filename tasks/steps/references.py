"""Trial of reference answers before grading: no answer can be graded by ``proof`` or ``1/0``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.rewards.references import plain_error, reference_errors

MAX_TRIED = 100_000
"""Number of formulas that a process tries, about two minutes; for others only the text is checked."""


@contextmanager
def references_screen() -> Iterator[RowFilter]:
    """Return a row filter against reference answers that grade no answer, each tried once.

    Raises:
        RewardError: the grader cannot be started.
    """
    known: dict[str, str] = {}
    yield lambda references: unusable(references, known)


def unusable(references: Sequence[str], known: dict[str, str]) -> Mapping[int, str]:
    """Return the reasons against unusable reference answers, by index. Empty ones and JSON of other graders pass.

    ``known`` caches earlier results and grows.
    """
    new = [each for each in dict.fromkeys(references) if each not in known and is_compared(each)]
    tried = new[: max(MAX_TRIED - len(known), 0)]
    known.update(zip(tried, reference_errors(tried), strict=True) if tried else ())
    known.update({each: plain_error(each) for each in new[len(tried) :]})
    return {
        place: f"no answer can be graded with it: it {error}"
        for place, each in enumerate(references)
        if (error := known.get(each, ""))
    }


def is_compared(reference: str) -> bool:
    """Return True if a reference answer is compared with answers: nonempty, and no JSON of another grader."""
    return bool(reference.strip()) and not reference.lstrip().startswith('{"')
