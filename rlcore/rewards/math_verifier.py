r"""Equality of what two texts state, decided by structure and exact values. Runs in a grader process.

A value is compared with a value, a list with a list, an interval with an interval or an inequality: see
:mod:`rlcore.rewards.mathematics.reading` for what is read, :mod:`rlcore.rewards.mathematics.exact_values` for how
values are compared, and ``docs/rewards.md`` for the policy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlcore.rewards.mathematics.equality import equals
from rlcore.rewards.mathematics.numeric_values import UndefinedError
from rlcore.rewards.mathematics.reading import read
from rlcore.rewards.mathematics.structures import Named, Text
from rlcore.rewards.mathematics.worked_out import is_worked_out

_MAX_TEXT = 80  # characters of LaTeX outside of the grammar that an answer may have to repeat
_WARM_UP = (r"\frac{\sqrt{8}}{2}", "x^2+1", "x=5", "[1,2)", r"\{1,2\}", r"\sin x", r"\begin{pmatrix}1\\2\end{pmatrix}")


def warm_up() -> None:
    """Parse and compare one of each kind, so that forked workers start warm."""
    for text in _WARM_UP:
        grade({"answer": text, "reference": text})
    grade({"answer": r"\sqrt{8}", "reference": r"2\sqrt{2}"})


def grade(request: dict[str, Any]) -> bool | str:
    """Whether ``answer`` equals ``reference`` (both LaTeX or plain mathematics); an unparsable answer is not equal.

    ``problem``: formulas of the problem; an answer that is one of them in another dress, and not in the reference's
    form, has solved nothing. None where any form is right.

    Without an ``answer``: why nobody can be graded by the reference; empty where it is sound.

    Raises:
        ValueError: nobody can be graded by the reference (``1/0``).
    """
    reference = read(request["reference"], is_reference=True)
    fault = _fault_of(request["reference"])
    if "answer" not in request:
        return fault
    if fault:
        raise ValueError(f"the reference {fault}")
    try:
        is_equal = equals(reference, read(request["answer"]))
        if not is_equal and isinstance(reference, Named):  # by a name as only references have
            named = read(request["answer"], is_reference=True)
            is_equal = isinstance(named, Named) and named.name == reference.name and equals(reference.item, named.item)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - whatever an answer does to the comparison, it is no right one
        return False
    problem = request.get("problem")
    return is_equal and (problem is None or is_worked_out(request["reference"], request["answer"], problem))


@lru_cache(maxsize=512)
def _fault_of(text: str) -> str:
    """Why an answer that says the same as the reference would not be right."""
    reference = read(text, is_reference=True)
    if isinstance(reference, Text) and len(text) > _MAX_TEXT and "\\" in text:
        return f"is {text[:40]!r}, which is no formula that can be read, and too long to be repeated"
    try:
        is_sound = equals(reference, read(text)) or equals(reference, reference)
    except UndefinedError:
        return f"is {text[:40]!r}, which has no value"
    return "" if is_sound else f"is {text[:40]!r}, which does not equal itself"
