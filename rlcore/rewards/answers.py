r"""Which part of a completion is its answer. Every search is one pass over the text: linear time for any input.

An answer is marked by ``\boxed{...}`` (also ``\box``, ``\fbox``), by ``#### ...`` at the start of a line, or by
``<answer>...</answer>``. The marker that ends last wins, and only text after the last ``</think>`` counts. Where the
chat template itself writes ``<think>`` before each completion (its prefill), there is no answer before ``</think>``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlcore.rewards.last_number import last_number
from rlcore.rewards.mathematics.spelling import plainly
from rlcore.rewards.units import with_percent_sign
from rlcore.types import Rollout

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox|box)\s?\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"^[ \t]*####(?!#)(.*)$", re.MULTILINE)
_TAGS = re.compile(r"<answer>|</answer>")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
# The words before a copula, and the copula; the words are bounded, so that matching is quick.
_LEAD = re.compile(
    r"(?:(?i:so|thus|hence|then|therefore|finally),? )?"
    r"([A-Za-z*](?:[A-Za-z',* -]{0,80}?[A-Za-z*])??) ?(?:\b(?:is|are|was|equals)\b:?|[:=]) ?"
)
# What a value is called: AB = 5, S_{10} = 5, P(A) = 5, \angle ABC = 5, \text{Area} = 5.
_NAMED = re.compile(
    r"(?:(?:[A-Za-z]|\\[a-z]{2,8})(?:_(?:[A-Za-z0-9]|\{[^{}]{1,30}\}))?'{0,3}(?:\( ?[^()=a-z]{1,20} ?\))?|[A-Z]{2,3}"
    r"|\|[A-Z]{2}\||\\overline ?\{ ?[A-Z]{2} ?\}|\\angle ?[A-Z]{1,3}"
    r"|\\text\{ ?[A-Za-z ]{1,40}(?P<stop>: ?)?\}) ?(?(stop)|[=:]) ?"
)
_NO_LEAD = re.compile(
    r"\b(?:what|how|which|who|whose|when|where|why|if|find|compute|calculate|solve|let|suppose|not|never|no|neither|or"
    r"|than|least|most|less|more|fewer|about|nearly|almost|half|twice|double|triple|third|quarter|square|cube|root|log"
    r"|exp|sin|cos|tan|sqrt|minus|negative|plus|times|over|percent|wrong|incorrect|false|except|without)\b|n't\b",
    re.IGNORECASE,
)
# 答案是 18
_HAN_LEAD = re.compile(r"(?:[\u3400-\u9fff, ]{1,20}(?:是|为|等于|[:=])|等于) ?(?=[-+$\\0-9.A-Za-z(])")
_NO_HAN_LEAD = re.compile("[不非没約约倍半]|至少|至多|最多|小于|大于|超过|少于|多于|如果|若|设")
# A word too short for one that says what is stated: a variable, or a product of two.
_VARIABLE = re.compile(r"\b(?!(?:an?|of|in|to|my|our|so|I|he|she|it|we|on|at|a)\b)[A-Za-z]{1,2}\b")
_ONE_VARIABLE = re.compile(r"[A-Za-z]")
# Letters and signs that show nothing, and LaTeX and tags that lay out what is inside.
_UNSEEN = re.compile("[\u115f\u1160\u2800\u3164\uffa0]")
_LAYOUT = re.compile(r"\\[A-Za-z]+\*?|\\[,;:! ]|[{}$~^`]|</?(?:answer|think)>|&[a-z]{2,8};")
# Commands that show something by themselves: letters, and what stands for a set or a value.
_SHOWS = re.compile(
    r"\\(?:(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon"
    r"|phi|chi|psi|omega)|infty|emptyset|varnothing|ell|hbar|aleph|checkmark|top|bot|pm|to|le|ge|lt|gt|ne|neq|leq|geq)"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
# LaTeX around an answer that is room or size; at its end in as many characters.
_AT_START = re.compile(
    r"\A(?:\s|\\[,;:! ]|~|\\(?:q?quad|displaystyle|textstyle|large|Large|LARGE|huge|Huge)(?![A-Za-z]))*"
)
_AT_END, _MAX_AT_END = re.compile(r"(?:\s|\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\\\)+\Z"), 60
_SET_IN_WORDS = re.compile(
    r"(?:\\text\{ ?)?(?:((?:the set of )?all real(?:s| numbers)|全体实数|任意实数)"
    r"|(?:the )?empty set|no (?:real )?(?:solutions?|roots?)|无解|无实数解|空集)(?: ?\})?",
    re.IGNORECASE,
)
MAX_ANSWER_CHARACTERS = 1_500
MAX_ANSWER_DEPTH = 25
"""How large an answer may be before any parser sees it, and how deeply nested."""
# LaTeX that takes room and shows nothing of what it is given.
_ROOM = re.compile(
    r"\\(?:[hv]?phantom|[hv]space\*?|rule|color|label|tag|kern|[hv]skip|textcolor|raisebox) ?(?:\[[^\]]*\])?"
    r"(?: ?\{[^{}]*\}){0,2}|(?<!\\)%[^\n]*|</?[a-z]{1,10}/?>"
    r"|\\(?:null|relax|hfill|hline|newline|par|dots|[lc]dots)(?![A-Za-z])"
)
_MAX_UNWRAPS = 4  # a bound, because each round reads the text again
# What stands between boxes that are one list: commas, "and", a few words before it; no word that takes one back.
_BETWEEN = re.compile(r"\s*(?:[,;]|(?:[A-Za-z0-9_=()]+ +){0,6}(?:and|or)\b[A-Za-z0-9_= ()]*|)[\s,;]*", re.IGNORECASE)
_BETWEEN_LAYOUT = re.compile(r"\\(?:q?quad|text|mbox|[,;:! ()\[\]])|[{}$~]")
_TAKES_BACK = re.compile(
    r"\b(?:no|not|rather|wait|actually|instead|sorry|wrong|hence|so|then|thus|therefore|but|is|are|was|were|get|gets|gives"
    r"|answer|result|final|finally|total|correct|if)\b",
    re.IGNORECASE,
)
_MAX_BETWEEN = 70
_OPENED = re.compile(r"\\(?:boxed|fbox|box)\s?\{|<answer>")
_PERCENT = re.compile(r"[\s}]*(?:\$|\\[)\]])?\s*(?:\\?%|(?:per ?cent|pct)\b)")


@dataclass(frozen=True, slots=True)
class Marked:
    """One marked answer: its kind, where the marker begins and ends in the text, and where its content does.

    Positions, because the contents of deeply nested boxes together are quadratic in the length of the text.
    """

    kind: str
    start: int
    end: int
    inner: tuple[int, int]


def find_answer(rollout: Rollout, *, last_number_counts: bool, prefill: str = "") -> str | None:
    """The answer of a completion as it is written; None when there is none. ``prefill``: as the chat template has it.

    The last marked answer, and none where a marker behind it is not closed; without a marker, the last number if that
    counts. A number at the end of a completion that was cut by the limit may be half a number: it does not count.
    """
    text = final_part(prefill + rollout.text)
    if text is None:
        return None
    if is_left_open(text):
        return None
    marked = last_marked_answer(text)
    if marked is None and last_number_counts and rollout.finish_reason == "stop":
        return last_number(text)
    return marked


def final_part(text: str) -> str | None:
    """The text after the last ``</think>``; None when a ``<think>`` is still open (the thinking was cut off)."""
    tail = text.rpartition(_THINK_CLOSE)[2]
    return None if _THINK_OPEN in tail else tail


def closing(prefill: str) -> str:
    """What a completion has to write before its answer: the end of the thinking that the chat template begins."""
    return _THINK_CLOSE if _THINK_OPEN in prefill else ""


def marked_answers(text: str) -> list[Marked]:
    """All marked answers of ``text``, in the order in which they end."""
    found = [*_boxes(text), *_tagged(text), *_hashed(text)]
    return sorted(found, key=lambda marked: (marked.end, -marked.start))


def last_marked_answer(text: str) -> str | None:
    r"""The content of the last marker, without blanks around it: ``<answer>\boxed{$5$}</answer>`` gives ``$5$``.

    Of boxes that are one list the contents, with commas: ``\boxed{2}`` and ``\boxed{3}`` give ``2, 3``.
    """
    found = marked_answers(text)
    if not found:
        return None
    row = _row_of_boxes(text, found)
    if len(row) > 1:
        return ", ".join(row)
    answer, kind = text[slice(*found[-1].inner)], found[-1].kind
    for _ in range(_MAX_UNWRAPS):
        box = max(_boxes(answer), key=lambda marked: marked.end, default=None)
        if box is None or (kind == "box" and box.end - box.start < len(answer.strip())):
            break
        answer, kind = answer[slice(*box.inner)], "box"
    return answer.strip()


def is_percent_behind(rollout: Rollout, prefill: str = "") -> bool:
    r"""True if a percent sign or the word follows the last box, outside of it: ``$\boxed{20}\%$``."""
    text = final_part(prefill + rollout.text) or ""
    found = marked_answers(text)
    return bool(found) and found[-1].kind == "box" and _PERCENT.match(text, found[-1].end) is not None


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: blanks, zero-width characters, letters that are no more than room."""
    return not any(unicodedata.category(character)[0] in "LNPS" for character in _UNSEEN.sub("", text))


def has_content(text: str) -> bool:
    r"""Whether there is something to read in a text besides layout and punctuation: not in ``\text{}`` and ``...``."""
    shown = _LAYOUT.sub("", _SHOWS.sub("x", _ROOM.sub("", _UNSEEN.sub("", text))))
    return any(unicodedata.category(each)[0] in "LNS" or each == "-" for each in shown)


def clean(answer: str) -> str:
    """Strip blanks, a final full stop or comma, and math or emphasis delimiters around the whole answer."""
    text = answer.strip()
    for _ in range(_MAX_UNWRAPS):  # nested delimiters: **$5$.**
        before = text
        text = _AT_START.sub("", text, count=1)
        text = text[:-_MAX_AT_END] + _AT_END.sub("", text[-_MAX_AT_END:])
        text = text.rstrip(".,;").strip() if not text.endswith("...") else text
        for opening, closing in _WRAPPERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)].strip()
        if text == before:
            break
    return text


def stated(answer: str) -> str:
    """What a sentence or an equation states: ``The answer is 18``, ``Total: 18`` and ``x = 18`` give ``18``.

    A variable of one letter, or words without digits, before ``is``, ``:`` or ``=``. A text that begins otherwise is
    given back as it is, as are questions, negations, and functions of what is asked for (``log x = 18``).
    """
    han = _HAN_LEAD.match(answer)
    if han is not None and not _NO_HAN_LEAD.search(han.group()):
        return clean(answer[han.end() :])
    named = _NAMED.match(answer)
    if named is not None and not _NO_LEAD.search(named.group()):
        return clean(answer[named.end() :])
    match = _LEAD.match(answer)
    if match is None:
        return answer
    lead, rest = match.group(1), answer[match.end() :]
    if not _ONE_VARIABLE.fullmatch(lead) and (_NO_LEAD.search(lead) or _VARIABLE.search(lead)):
        return answer
    return clean(rest.removeprefix("**") if lead.count("**") % 2 else rest)  # **Answer:** 18


def find_reference(reference: str) -> str:
    """The answer inside a reference: its last marked answer, or all of it."""
    marked = last_marked_answer(reference)
    return spelled(reference if marked is None else marked)


def spelled(text: str) -> str:
    """An answer without what is around it, in plain characters, with signs for percent and sets in words."""
    found = with_percent_sign(clean(plainly(text)))
    words = _SET_IN_WORDS.fullmatch(found)
    return found if words is None else r"\mathbb{R}" if words.group(1) else r"\emptyset"


def brace_depth(text: str) -> int:
    """The deepest nesting of braces, brackets and parentheses."""
    depth = deepest = 0
    for character in text:
        if character in "{[(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}])":
            depth = max(depth - 1, 0)
    return deepest


def is_left_open(text: str) -> bool:
    """True if a marker is opened behind the last one that is closed, and never closed itself."""
    last = max((marked.end for marked in marked_answers(text)), default=0)
    return _OPENED.search(text, last) is not None


def _row_of_boxes(text: str, found: Sequence[Marked]) -> list[str]:
    """The contents of the last boxes that stand in a row, with nothing but commas, ``and`` and a few words between."""
    row = [found[-1]]
    for marked in found[-2::-1]:
        between = text[marked.end : row[0].start]
        plain = _BETWEEN_LAYOUT.sub(" ", between)
        is_row = marked.kind == row[0].kind == "box" and marked.end <= row[0].start and len(between) <= _MAX_BETWEEN
        if not is_row or _BETWEEN.fullmatch(plain) is None or _TAKES_BACK.search(plain):
            break
        row.insert(0, marked)
    contents = list(dict.fromkeys(text[slice(*marked.inner)].strip() for marked in row))
    return contents if all(contents) and not any("\\box" in content for content in contents) else []


def _boxes(text: str) -> Iterator[Marked]:
    """Balanced boxes, in the order in which they close; an unbalanced one is none."""
    open_braces: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                yield Marked("box", opened[0], match.end(), (opened[1], match.start()))
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:  # an escaped brace, \{, is text
            open_braces.append(match.span())


def _tagged(text: str) -> Iterator[Marked]:
    opened: re.Match[str] | None = None
    for match in _TAGS.finditer(text):
        if match.group() == "<answer>":
            opened = match
        elif opened is not None:
            yield Marked("tag", opened.start(), match.end(), (opened.end(), match.start()))
            opened = None


def _hashed(text: str) -> Iterator[Marked]:
    for match in _HASHES.finditer(text):
        yield Marked("hashes", match.start(), match.end(), match.span(1))
