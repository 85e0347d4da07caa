"""Reward for an answer equal to the reference, by the rules of ``docs/rewards.md``.

They are strict, because a policy exploits every loose one. Plain numbers and words are compared here, all else by
:mod:`rlcore.rewards.math_verifier` in a process with a timeout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rlcore.config import Duration, PositiveInt
from rlcore.rewards.answers import (
    MAX_ANSWER_CHARACTERS,
    MAX_ANSWER_DEPTH,
    accepted_answers,
    brace_depth,
    clean,
    extract_stated,
    find_answer,
    find_reference,
    is_percent_after_box,
    spelled,
)
from rlcore.rewards.base import failed_score, score_all, scored
from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.mathematics.formula import read_notation
from rlcore.rewards.mathematics.spelling import canonical
from rlcore.rewards.references import plain_error
from rlcore.rewards.units import parse_number, parse_quantity, same_magnitude, scale_words, separate_unit
from rlcore.types import Rollout, Score, is_correct

_MAX_WRAPS = 4
_LONG_DIGITS = re.compile(r"[0-9]{200}")
# A power in an exponent, an exponent or a factorial of five digits: too slow for a parser.
_HUGE = re.compile(
    r"(?:\^|\*\*) ?(?:[0-9.]{1,40} ?(?:\^|\*\*)|[({][^(){}]{0,80}(?:\^|\*\*)|[({]? ?[-+]?[0-9]{5})"
    r"|[0-9]{5} ?!|! ?!|\^[^!]{1,40}!"
)
_SIDE_BY_SIDE = re.compile(r"(?<!_)[0-9](?:\s|~|\\[ ,;:!]|\\q?quad)+[0-9]")
_EQUALS = re.compile(r"(?<![<>!])=")
# Not words: letters of choices (A and C, ABD), names of times.
_ROMAN = "(?:[A-J]|I{1,3}|IV|V)"
_CHOICES = re.compile(rf"[A-J]{{1,6}}|{_ROMAN}(?: (?:and|or) {_ROMAN})+|noon|midnight")
_WORDS = re.compile(r"(?:\\(?:text|textbf|textit|mathrm|mbox)\{)?([A-Za-z][A-Za-z ]*[A-Za-z])\}?")
_ORDINAL = re.compile(r"(?<=[0-9])(?:st|nd|rd|\^?\{?(?:\\text\{ ?)?th\}?\}?)$")
_BASE_TEN = re.compile(r"(?<=[0-9])_(?:\{ ?10 ?\}|10)$")
_OPERATION = re.compile(r"[-+*/^(|]|\\[a-z]")
_SPELLING = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!]|\\displaystyle(?![a-z])|[{}$~]")
_FORMULA = re.compile(r"\$([^$]{3,200})\$|\\\((.{3,200}?)\\\)|\\\[(.{3,200}?)\\\]", re.DOTALL)
# Mathematics without dollar signs in a text: consecutive signs and short names.
_PLAIN_FORMULA = re.compile(
    r"(?<![A-Za-z\\])(?:[0-9.+*/^()=<>{} -]|\\[a-z]+|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])){4,200}"
)
# Before and after an item of a list: (a) 2/5 (b) 3; 2/5, 3 or 4.
_BEFORE_ITEM = re.compile(r"(?:(?<![A-Za-z0-9])[A-Ja-j1-9][).]|[0-9}$] ?(?:[,;]|,? ?\b(?:and|or)\b))[\s$]*\Z")
_AFTER_ITEM = re.compile(r"[\s$]*(?:[,;]|,? ?\b(?:and|or)\b)[\s$]*[-+]?[0-9.\\]")
_MAX_PROBLEM, _MAX_FORMULAS = 4_000, 8
# Parentheses or a style around a whole number.
_WRAPPED = re.compile(
    r"(?:\\left ?)?\(([^()]*?)(?:\\right ?)?\)|\\(?:text|mathrm|mathbf|textbf|boldsymbol|mathit|underline)\{([^{}]*)\}"
)
# Parentheses behind a sign, -(5/6), and around a part of a fraction, (-5)/(6).
_SIGNED = re.compile(r"([-+]) ?(?:\\left ?)?\( ?([0-9.\\][^()]*?) ?(?:\\right ?)?\)")
_PART = re.compile(r"(?:^|(?<=^-)|(?<=/)) ?\( ?([-+]?[0-9.]{1,40}) ?\)(?=$| ?/)")
_SHORT_WORD = re.compile("[A-Z][a-z]")
_MIN_WORD = 3  # shorter references (x, ab, A) are mathematics or choices


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    r"""Options of the reward ``math``.

    Attributes:
        last_number: Accept the last number of a finished completion as an unmarked answer.
        evaluated_only: Require an evaluated answer: for a number a number in lowest terms (not ``6/2`` for 3); for an
            expression, one without operations that the reference lacks, and not a formula of the problem.
    """

    last_number: bool = True
    evaluated_only: bool = True
    timeout_seconds: Duration = 1.0
    num_workers: PositiveInt = 2


class MathReward:
    r"""1.0 for an answer equal to ``rollout.prompt.reference``, else 0.0; None if the grader failed or timed out.

    ``The answer is \box{1.1}.`` with reference ``1.1`` scores 1.0. The answer of a reference that is a worked solution
    (``... #### 72``) is its last marked answer. A reference that is a JSON list of texts accepts any of them.
    """

    name = "math"

    def __init__(self, options: MathOptions | None = None, *, prefill: str = "") -> None:
        self._options, self._prefill = options or MathOptions(), prefill
        self._pool = GraderPool(
            "math", timeout_seconds=self._options.timeout_seconds, num_workers=self._options.num_workers
        )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        accepted = [_usable(accepted_answers(rollout.prompt.reference)) for rollout in rollouts]
        pairs = [(rollout, each) for rollout, answers in zip(rollouts, accepted, strict=True) for each in answers]
        prepared = [self._prepare(_with_reference(rollout, each)) for rollout, each in pairs]
        scores = iter(score_all(prepared, self._pool, self._score))
        return [_best([next(scores) for _ in answers]) for answers in accepted]

    def close(self) -> None:
        self._pool.close()

    def _prepare(self, rollout: Rollout) -> Score | dict[str, Any]:
        if error := plain_error(rollout.prompt.reference):
            return failed_score(f"the reference {error}")
        found = find_answer(rollout, last_number_counts=self._options.last_number, prefill=self._prefill)
        answer, reference = spelled(found or ""), find_reference(rollout.prompt.reference)
        if reference.endswith("%") and not answer.endswith("%") and is_percent_after_box(rollout, self._prefill):
            answer += reference[-2:] if reference.endswith("\\%") else "%"
        problem = _problem_of(rollout) if self._options.evaluated_only else ""
        is_right = compare_exact(answer, reference, evaluated_only=self._options.evaluated_only, problem=problem)
        if is_right is not None:
            return self._score(is_right)
        request = {"answer": _as_stated(answer, reference), "reference": reference}
        return request | {"problem": _formulas(problem)} if self._options.evaluated_only else request

    def _score(self, is_right: bool) -> Score:
        return scored(self.name, float(is_right))


def _usable(answers: list[str]) -> list[str]:
    return [each for each in answers if not plain_error(each)] or answers[:1]


def _with_reference(rollout: Rollout, reference: str) -> Rollout:
    if rollout.prompt.reference == reference:
        return rollout
    return replace(rollout, prompt=replace(rollout.prompt, reference=reference))


def _best(scores: Sequence[Score]) -> Score:
    """Return the best score by the accepted answers; a failed comparison counts unless the answer equals another."""
    best = max(scores, key=lambda score: -1.0 if score.value is None else score.value)
    failed = [score for score in scores if score.value is None]
    return failed[0] if failed and not is_correct(best) else best


def compare_exact(answer: str, reference: str, *, evaluated_only: bool, problem: str = "") -> bool | None:
    """Return the result without symbolic mathematics; None if that is needed."""
    stated = _as_stated(answer, reference)
    if any(_has_same_text(each, reference) for each in (answer, stated)):
        return True
    answer = stated
    if not answer or _is_refused(answer, reference):
        return False
    expected = parse_quantity(reference)
    given = parse_quantity(answer if expected is None else _as_plain(answer))
    if expected is not None and expected == given and _is_item(answer, problem):
        return same_magnitude(answer, reference)
    if not same_magnitude(answer, reference) or (evaluated_only and _is_restated(answer, reference, problem)):
        return False
    if expected is not None and given is not None:
        return expected == given and (given.is_evaluated or not evaluated_only)
    if expected is not None and "\\approx" in answer:
        return None if _states_rounded(answer, expected.value) else False
    if expected is not None and read_notation(canonical(reference)) is not None:  # 8 pm
        return None
    if evaluated_only and (expected is not None or is_unevaluated(answer, reference)):
        return False
    if scale_words(answer) != scale_words(reference):
        return False
    return False if _is_in_words(reference) or (expected is not None and _WORDS.fullmatch(answer)) else None


def _has_same_text(answer: str, reference: str) -> bool:
    is_same = answer == reference or (_is_in_words(reference) and _as_words(answer) == _as_words(reference))
    return bool(answer) and is_same


def _is_in_words(reference: str) -> bool:
    words = _WORDS.fullmatch(reference)
    return words is not None and _is_word(words.group(1))


def _is_word(text: str) -> bool:
    return (len(text) >= _MIN_WORD or _SHORT_WORD.fullmatch(text) is not None) and not _CHOICES.fullmatch(text)


def _states_rounded(answer: str, expected: Fraction) -> bool:
    """Return True if an answer with an approximation has the expected plain number; equality is checked later."""
    parts = answer.split("=")[-1].split("\\approx")
    numbers = [parse_number(clean(part)) for part in parts]
    return any(number is not None and number.value == expected for number in numbers)


def _problem_of(rollout: Rollout) -> str:
    question = next((turn.content for turn in reversed(rollout.prompt.messages) if turn.role == "user"), "")
    return question[-_MAX_PROBLEM:]


def _formulas(problem: str) -> list[str]:
    found = [next(group for group in match.groups() if group) for match in _FORMULA.finditer(problem)]
    found += [match.group().strip(" .,;:?") for match in _PLAIN_FORMULA.finditer(_FORMULA.sub(" ", problem))]
    sides = [side.strip() for formula in found for side in _EQUALS.split(formula)]
    return [side for side in sides if _OPERATION.search(side) and not _is_refused(side, "")][:_MAX_FORMULAS]


def _is_restated(answer: str, reference: str, problem: str) -> bool:
    """Return True if an answer with an operation occurs in the problem, and is not the reference respelled."""
    written, expected = ("".join(_respelt(text).split()) for text in (answer, reference))
    if not problem or written == expected or not (_OPERATION.search(written.lstrip("-+")) or "=" in written):
        return False
    if parse_quantity(answer) is not None and (parse_number(answer) is None or _is_fraction(expected)):
        return False  # 60 km/h for 60, and 3/4 for \\frac{3}{4}
    forms = {written, "=".join(written.split("=")[::-1])}  # both directions
    return any(_occurrences(form, _respelt(problem)) for form in forms)


def _is_item(answer: str, problem: str) -> bool:
    text = _respelt(problem)
    found = _occurrences("".join(_respelt(answer).split()), text)
    return any(
        _BEFORE_ITEM.search(text, max(start - 40, 0), start) or _AFTER_ITEM.match(text, end) for start, end in found
    )


def _occurrences(form: str, text: str) -> list[tuple[int, int]]:
    as_written = r"\s*".join(map(re.escape, form))
    return [found.span() for found in re.finditer(rf"(?<![\w.])(?:{as_written})(?!\w|\^|\.[0-9])", text)]


def _is_fraction(text: str) -> bool:
    return "/" in text or "frac" in text


def _respelt(text: str) -> str:
    plain = _SPELLING.sub("", text.replace("**", "^").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return re.sub(r"\\(?:cdot|times)(?![a-z])|×|·", "*", plain)


def _as_plain(answer: str) -> str:
    text = re.sub(r"\\displaystyle|\\[,;:! ]+$", "", answer).strip()
    for _ in range(_MAX_WRAPS):
        inside = _WRAPPED.fullmatch(text)
        if inside is None:
            break
        text = (inside.group(1) or inside.group(2) or "").strip()
    text = _BASE_TEN.sub("", re.sub(r"^([0-9]{1,40}) ?: ?([0-9]{1,40})$", r"\1/\2", _ORDINAL.sub("", text)))
    text = re.sub(r"^([-+])(?: |\\[,;:!])+(?=[0-9.\\$])", r"\1", text)
    text = re.sub(r"^(\\?\$)-(?=[0-9.])", r"-\1", text)
    text = _PART.sub(r"\1", text)
    signed = _SIGNED.fullmatch(text)
    if signed is not None and parse_number(signed[2]) is not None:
        text = signed[1] + signed[2]
    return separate_unit(text)


def _as_stated(answer: str, reference: str) -> str:
    found = extract_stated(answer)
    if found == answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return answer
    is_number = parse_quantity(_as_plain(found)) is not None and parse_quantity(reference) is not None
    is_word = _WORDS.fullmatch(found) is not None and _WORDS.fullmatch(reference) is not None
    return found if is_number or is_word else answer


def _is_refused(answer: str, reference: str) -> bool:
    return (
        len(answer) > MAX_ANSWER_CHARACTERS
        or brace_depth(answer) > MAX_ANSWER_DEPTH
        or _LONG_DIGITS.search(answer) is not None
        or (_HUGE.search(answer) is not None and _HUGE.search(reference) is None)
        or (
            any(character.isnumeric() and not character.isascii() for character in answer)
            and not parse_quantity(answer)
        )
        or ("%" in answer) != ("%" in reference)
        or (_SIDE_BY_SIDE.search(answer) is not None and parse_quantity(answer) is None)
        or "\\box" in answer
        or "\\fbox" in answer
    )


def _as_words(text: str) -> str:
    match = _WORDS.fullmatch(text)
    return " ".join((match.group(1) if match else text).casefold().split())


# Operations allowed only if the reference has them: named operations, derivatives, factorials.
_UNEVALUATED = re.compile(
    r"\\(?:i{0,3}int|oint|sum|prod|lim(?:sup|inf)?|cap|gcd|det|max|min|[dt]?binom|[pb]?mod|ldots)(?![a-z])|!|'"
    r"|(?<![A-Za-z\\])(?:gcd|lcm|lim|int|integral|sum|prod|det|binom|mod|diff|derivative|expand|factor|simplify|solve)"
    r"(?![A-Za-z])"
    r"|\\frac ?\{ ?(?:d|\\partial)[^{}]{0,40}\} ?\{ ?(?:d|\\partial) ?(?:[A-Za-z]|\\[a-z]+)(?: ?\^[^{}]{1,3})? ?\}"
    r"|(?<![A-Za-z])d ?/ ?d ?[A-Za-z](?![A-Za-z])"
)
# Unevaluated too if the reference is a constant: \sin 30^\circ for 1/2.
_CALL = re.compile(
    r"\\?(?<![A-Za-z])(?:a(?:rc)?)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|\\?(?<![A-Za-z])(?:log|ln|lg|exp)(?![a-z])"
)
_INVERSE = re.compile(r"\\(?=(?:sin|cos|tan|cot|sec|csc)h? ?\^ ?\{ ?-1 ?\})")


def is_unevaluated(answer: str, reference: str) -> bool:
    """Return True if the answer has an operation that the reference does not."""
    answer, reference = canonical(answer), canonical(reference)
    left = [{_sort_of("".join(found.split())) for found in _UNEVALUATED.findall(text)} for text in (answer, reference)]
    if left[0] - left[1]:
        return True
    is_constant = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", reference)) is None
    return is_constant and bool(_sorts_of_functions(answer) - _sorts_of_functions(reference))


def _sort_of(operation: str) -> str:
    return "!" if operation.endswith("binom") else "mod" if operation.endswith("mod") else operation


def _sorts_of_functions(text: str) -> set[str]:
    found = {name.strip("\\") for name in _CALL.findall(_INVERSE.sub("arc", text))}
    return {
        "log" if name in ("log", "ln", "lg") else "exp" if name == "exp" else "arc" if name[0] == "a" else "sin"
        for name in found
    }
