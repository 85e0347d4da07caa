"""Detection of unusable reference answers: ``proof``, ``notfound``, ``1/0``, a paragraph, an unclosed box.

The data gate rejects them before a run (:func:`reference_errors`), and the reward reports the same error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rlcore.rewards.answers import (
    MAX_ANSWER_CHARACTERS,
    MAX_ANSWER_DEPTH,
    accepted_answers,
    brace_depth,
    find_reference,
    has_content,
    is_left_open,
)
from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.units import parse_quantity

_PLACEHOLDER = re.compile(
    r"(?:(?:the|a) )?(?:proofs?|prove[dn]?|solutions?|explanations?)"
    r"(?: (?:above|below|omitted|required|complete|(?:is|are) (?:omitted|complete|left|shown|given).*"
    r"|in the (?:solution|text)))?"
    r"|(?:prove|show) that .*|.{0,40}(?:statement|claim|inequality|identity|theorem) is (?:proven|proved|shown)\.?"
    r"|see (?:the )?(?:proof|solution|explanation|above|below|figure|graph|diagram|table|text).*|q\.? ?e\.? ?d\.?"
    r"|\[?(?:answers? |solutions? )?not ?(?:found|available|given|provided|specified|stated|applicable|supported|yet)"
    r"(?: \w+)?\]?|n/?a|null|nan|unknown|tbd|todo|to be (?:determined|added|done)|error|(?:the )?answer"
    r"|no (?:answer|solution) (?:found|given|available|provided)|no answer|none (?:given|provided|available)"
    r"|answers? (?:may )?var(?:y|ies)\.?|placeholder|[?._ -]+|\\ldots|\\(?:black)?square|\\qed"
    r"|(?:证明|解答?|答案)?(?:略|见(?:解析|答案|证明|图|上|下)|暂?无|证毕)|证明|解析",
    re.IGNORECASE,
)
_PICTURE = re.compile(
    r"\\includegraphics|\[asy\]|!\[[^\]]*\]\(|<img|https?://|\\begin\{(?:tikzpicture|tabular|figure)\}"
)
_NO_VALUE = re.compile(r"/ ?0(?![.0-9])|\\frac ?\{[^{}]*\} ?\{ ?0 ?\}|(?<![0-9.])0 ?\^ ?(?:0(?![.0-9])|\{ ?0 ?\})")
_PARTS = re.compile(r"(?:\A|[\s;,])\((?:a|i|1)\)\s*[^\s,;].*[\s;,]\((?:b|ii|2)\)\s*\S", re.DOTALL)
_CUT_OFF = re.compile(r"(?:[=*/_<>]|(?<!\^)(?<!\{)[+-]|\^|\\(?:[dt]?frac|sqrt|cdot|times|div|le|ge|ne|pm|left))\s*\Z")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])")
_LAYOUT = re.compile(r"\\(?:begin|end) ?\{[a-z*]+\}(?:\{[clr| ]*\})?|\\(?:text[a-z]*|mbox|mathrm|operatorname)|[{}$]")
MAX_WORDS = 12
_SECONDS = 5.0


@lru_cache(maxsize=4096)
def plain_error(reference: str) -> str:
    """Return why a reference is unusable, as far as its text shows; empty if it may be usable."""
    errors = [_plain_error(each) for each in accepted_answers(reference)]
    return errors[0] if all(errors) else ""


def _plain_error(reference: str) -> str:
    written = find_reference(reference)
    if not has_content(written):
        return "has no content"
    if parse_quantity(written) is not None:
        return ""
    if _PLACEHOLDER.fullmatch(_LAYOUT.sub("", written).strip()):
        return f"is not an answer: {written[:40]!r}"
    if _NO_VALUE.search(written):
        return f"has no value: {written[:40]!r}"
    if is_left_open(reference):
        return "has an unclosed answer marker"
    return _form_error(written)


def _form_error(written: str) -> str:
    if len(written) > MAX_ANSWER_CHARACTERS:
        return f"has more than {MAX_ANSWER_CHARACTERS:,} characters, the limit of an answer"
    braces = _BRACE.findall(written)
    if braces.count("{") != braces.count("}") or _CUT_OFF.search(written):
        return f"is truncated: {written[-40:]!r}"
    if _PICTURE.search(written):
        return "is a picture or a table"
    if _PARTS.search(written):
        return "has several parts, which an answer would have to repeat"
    if brace_depth(written) > MAX_ANSWER_DEPTH:
        return f"is nested deeper than {MAX_ANSWER_DEPTH}, the limit of an answer"
    num_words = len(_WORD.findall(_LAYOUT.sub(" ", written)))
    return f"has {num_words} words, which an answer would have to repeat" if num_words > MAX_WORDS else ""


def reference_errors(
    references: Sequence[str], *, timeout_seconds: float = _SECONDS, num_workers: int = 2
) -> list[str]:
    """Return why each reference is unusable; empty if its own text is a correct answer within the time limit.

    Of several accepted answers one has to be usable.

    Raises:
        RewardError: The grader cannot be started.
    """
    accepted = {reference: accepted_answers(reference) for reference in references}
    errors = {each: plain_error(each) for answers in accepted.values() for each in answers}
    formulas = [reference for reference, error in errors.items() if not error and not _is_plain(reference)]
    with GraderPool("math", timeout_seconds=timeout_seconds, num_workers=num_workers) as pool:
        outcomes = pool.grade_all([{"reference": find_reference(reference)} for reference in formulas])
    for reference, outcome in zip(formulas, outcomes, strict=True):
        errors[reference] = outcome.error or str(outcome.value)
    found = {reference: [errors[each] for each in answers] for reference, answers in accepted.items()}
    return [found[reference][0] if all(found[reference]) else "" for reference in references]


def _is_plain(reference: str) -> bool:
    written = find_reference(reference)
    return parse_quantity(written) is not None or re.fullmatch(r"[A-Za-z][A-Za-z ]*", written) is not None
