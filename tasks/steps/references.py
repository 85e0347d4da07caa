"""Reference answers are tried before answers are graded by them: nobody can be graded by ``proof`` or ``1/0``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.rewards.references import plain_error, reference_errors

MAX_TRIED = 100_000
"""So many different formulas are tried in a process, about two minutes; of further ones the text alone is judged."""


@contextmanager
def references_screen() -> Iterator[RowFilter]:
    """A look at references: reasons against those that grade no answer, each tried once.

    Raises:
        RewardError: the grader cannot be started.
    """
    known: dict[str, str] = {}
    yield lambda references: unusable(references, known)


def unusable(references: Sequence[str], known: dict[str, str]) -> Mapping[int, str]:
    """The reasons against some references, by their place. Empty ones and those of other graders are left alone.

    ``known``: what was found before, which grows.
    """
    new = [each for each in dict.fromkeys(references) if each not in known and is_compared(each)]
    tried = new[: max(MAX_TRIED - len(known), 0)]
    known.update(zip(tried, reference_errors(tried), strict=True) if tried else ())
    known.update({each: plain_error(each) for each in new[len(tried) :]})
    return {
        place: f"nobody can be graded by it: it {fault}"
        for place, each in enumerate(references)
        if (fault := known.get(each, ""))
    }


def is_compared(reference: str) -> bool:
    """True if a reference is an answer that is compared: it is not empty, and no JSON of another grader."""
    return bool(reference.strip()) and not reference.lstrip().startswith('{"')
