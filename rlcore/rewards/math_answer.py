r"""Does the answer of a completion equal the reference? Plain numbers exactly and at once, the rest symbolically.

Rules, strict on purpose, because a policy finds every loose one:

- the last marked answer counts, ``\boxed{}``, ``####`` or ``<answer>`` (see :mod:`rlcore.rewards.answers`);
- plain numbers and fractions are equal exactly, as rationals: 0.333 is not 1/3;
- a percent sign stands on both sides or on neither: 50% is neither 0.5 nor 50;
- a sentence or an equation that states one number states it: ``The answer is 18``, ``x = 18``; besides that no more
  ``=`` than the reference has; no second box; no two numbers side by side; ASCII digits only; no list for a number;
  words that multiply (``million``, ``dozen``) do, and elsewhere stand on both sides or on neither; no power tower;
- a reference in words (``Paris``) is compared as text, without case;
- everything else is compared by math_verify under further rules (:mod:`rlcore.rewards.math_verifier`), in a process
  that is killed at a deadline. Units are not compared: ``5 cm`` answers ``5``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.config import Fraction, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.rewards.answers import brace_depth, clean, find_answer, last_marked_answer, stated
from rlcore.rewards.base import graded, score_all
from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.units import parse_quantity, scale_words, with_percent_sign
from rlcore.rewards.worked_steps import is_sound_work
from rlcore.types import CORRECT_FROM, Rollout, Score

MAX_ANSWER_CHARACTERS = 1_500
MAX_ANSWER_DEPTH = 25
_LONG_DIGITS = re.compile(r"[0-9]{200}")
# A power in an exponent, an exponent or a factorial of five digits: what takes a parser beyond its deadline.
_HUGE = re.compile(
    r"(?:\^|\*\*) ?(?:[0-9.]{1,40} ?(?:\^|\*\*)|[({][^(){}]{0,80}(?:\^|\*\*)|[({]? ?[-+]?[0-9]{5})"
    r"|[0-9]{5} ?!|! ?!|\^[^!]{1,40}!"
)
_SIDE_BY_SIDE = re.compile(r"(?<!_)[0-9](?:\s|~|\\[ ,;:!]|\\q?quad)+[0-9]")
_EQUALS = re.compile(r"(?<![<>!])=")
_LIST = re.compile(r"(?:\\left ?)?\[")
_WORDS = re.compile(r"(?:\\(?:text|textbf|textit|mathrm|mbox)\{)?([A-Za-z][A-Za-z ]*[A-Za-z])\}?")
_MIN_WORD = 3  # shorter references (x, ab, A) are mathematics or choices


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """``last_number``: an unmarked answer is the last number of a completion that ended by itself.

    ``evaluated_only``: where the reference is a plain number the answer must be one too, fractions in lowest terms;
    set it where the prompt is the expression itself and could be echoed (``3+4`` for 7, ``6/2`` for 3).

    ``partial`` is what a wrong answer to a number is worth after sound work, see :mod:`rlcore.rewards.worked_steps`.
    """

    last_number: bool = True
    evaluated_only: bool = False
    partial: Fraction = 0.0
    timeout_seconds: PositiveFloat = 1.0
    num_workers: PositiveInt = 2

    def __post_init__(self) -> None:
        if self.partial >= CORRECT_FROM:
            raise ConfigError(f"partial = {self.partial} would count as correct: it must be below {CORRECT_FROM}")


class MathReward:
    r"""1.0 for an answer equal to ``rollout.prompt.reference``, else 0.0; None when the grader failed or timed out.

    With ``partial``, that instead of 0.0 where sound work leads to the reference, but another answer is stated.

    ``The answer is \box{1.1}.`` with reference ``1.1`` scores 1.0. A reference that is a whole worked solution
    (``... #### 72``) counts as its last marked answer.
    """

    name = "math"

    def __init__(self, options: MathOptions | None = None, *, prefill: str = "") -> None:
        self._options, self._prefill = options or MathOptions(), prefill
        self._pool = GraderPool(
            "math", timeout_seconds=self._options.timeout_seconds, num_workers=self._options.num_workers
        )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = score_all([self._prepare(rollout) for rollout in rollouts], self._pool, self._score)
        if not self._options.partial:
            return scores
        return [self._credit(rollout, score) for rollout, score in zip(rollouts, scores, strict=True)]

    def close(self) -> None:
        """End the grader processes."""
        self._pool.close()

    def _prepare(self, rollout: Rollout) -> Score | dict[str, str]:
        found = find_answer(rollout, last_number_counts=self._options.last_number, prefill=self._prefill)
        answer = with_percent_sign(clean(found or ""))
        reference = with_percent_sign(find_reference(rollout.prompt.reference))
        verdict = decide(answer, reference, evaluated_only=self._options.evaluated_only)
        return {"answer": answer, "reference": reference} if verdict is None else self._score(verdict)

    def _credit(self, rollout: Rollout, score: Score) -> Score:
        expected = parse_quantity(find_reference(rollout.prompt.reference))
        if score.value != 0.0 or expected is None or not is_sound_work(rollout.text, expected.value):
            return score
        return graded(self.name, self._options.partial)

    def _score(self, is_right: bool) -> Score:
        return graded(self.name, float(is_right))


def find_reference(reference: str) -> str:
    """The answer inside a reference: its last marked answer, or all of it."""
    marked = last_marked_answer(reference)
    return clean(reference if marked is None else marked)


def decide(answer: str, reference: str, *, evaluated_only: bool) -> bool | None:
    """The verdict without symbolic mathematics; None when that is needed."""
    answer = _as_stated(answer, reference)
    if not answer or (answer != reference and _is_refused(answer, reference)):
        return False
    expected, given = parse_quantity(reference), parse_quantity(answer)
    if expected is not None and given is not None:
        return expected == given and (given.is_evaluated or answer == reference or not evaluated_only)
    if expected is not None and evaluated_only:
        return False
    if answer == reference:
        return True
    if scale_words(answer) != scale_words(reference):
        return False
    words = _WORDS.fullmatch(reference)
    if words is not None and len(words.group(1)) >= _MIN_WORD:
        return _as_words(answer) == _as_words(reference)
    return False if expected is not None and _WORDS.fullmatch(answer) else None


def _as_stated(answer: str, reference: str) -> str:
    """What the answer states, where that is of the reference's kind, a number or words; else the answer as it is."""
    found = stated(answer)
    if found == answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return answer
    is_number = parse_quantity(found) is not None and parse_quantity(reference) is not None
    is_word = _WORDS.fullmatch(found) is not None and _WORDS.fullmatch(reference) is not None
    return found if is_number or is_word else answer


def _is_refused(answer: str, reference: str) -> bool:
    """The rules that stand before any comparison (module docstring), and the bounds on what a parser may see."""
    return (
        len(answer) > MAX_ANSWER_CHARACTERS
        or brace_depth(answer) > MAX_ANSWER_DEPTH
        or _LONG_DIGITS.search(answer) is not None
        or (_HUGE.search(answer) is not None and _HUGE.search(reference) is None)
        or any(character.isnumeric() and not character.isascii() for character in answer)
        or ("%" in answer) != ("%" in reference)
        or len(_EQUALS.findall(answer)) > len(_EQUALS.findall(reference))
        or (_LIST.match(answer) is not None and "[" not in reference)
        or (_SIDE_BY_SIDE.search(answer) is not None and parse_quantity(answer) is None)
        or "\\box" in answer
        or "\\fbox" in answer
    )


def _as_words(text: str) -> str:
    match = _WORDS.fullmatch(text)
    return " ".join((match.group(1) if match else text).casefold().split())
