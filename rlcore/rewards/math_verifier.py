"""Equality of the values that two texts state, by structure and exact values. Runs in a grader process.

See ``docs/rewards.md`` for the policy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlcore.rewards.mathematics.equality import equals
from rlcore.rewards.mathematics.formula import Named, Text
from rlcore.rewards.mathematics.numeric_values import UndefinedError
from rlcore.rewards.mathematics.reading import read
from rlcore.rewards.mathematics.worked_out import is_worked_out

_MAX_TEXT = 80  # longest LaTeX outside of the grammar that an answer may have to repeat
_WARM_UP = (r"\frac{\sqrt{8}}{2}", "x^2+1", "x=5", "[1,2)", r"\{1,2\}", r"\sin x", r"\begin{pmatrix}1\\2\end{pmatrix}")


def warm_up() -> None:
    """Parse and compare one item of each kind, so that forked workers start warm."""
    for text in _WARM_UP:
        grade({"answer": text, "reference": text})
    grade({"answer": r"\sqrt{8}", "reference": r"2\sqrt{2}"})


def grade(request: dict[str, Any]) -> bool | str:
    """Return True if ``answer`` equals ``reference`` (both LaTeX or plain mathematics). Unparsable answers are wrong.

    ``problem`` has formulas of the problem. An answer that restates one of them, not in the form of the reference, is
    wrong. With None, any form is accepted. Without an ``answer``, return why the reference is unusable, or "".

    Raises:
        ValueError: No answer can be graded by the reference (``1/0``).
    """
    reference = read(request["reference"], is_reference=True)
    error = _error_of(request["reference"])
    if "answer" not in request:
        return error
    if error:
        raise ValueError(f"the reference {error}")
    try:
        is_equal = equals(reference, read(request["answer"]))
        if not is_equal and isinstance(reference, Named):  # a name that only references may have
            named = read(request["answer"], is_reference=True)
            is_equal = isinstance(named, Named) and named.name == reference.name and equals(reference.item, named.item)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - an answer that breaks the comparison is wrong
        return False
    problem = request.get("problem")
    return is_equal and (problem is None or is_worked_out(request["reference"], request["answer"], problem))


@lru_cache(maxsize=512)
def _error_of(text: str) -> str:
    reference = read(text, is_reference=True)
    if isinstance(reference, Text) and len(text) > _MAX_TEXT and "\\" in text:
        return f"is {text[:40]!r}, which is not a readable formula, and too long to be repeated"
    try:
        is_sound = equals(reference, read(text)) or equals(reference, reference)
    except UndefinedError:
        return f"is {text[:40]!r}, which has no value"
    return "" if is_sound else f"is {text[:40]!r}, which does not equal itself"
