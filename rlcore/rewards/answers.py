r"""Extraction of the answer from a completion. Every search is one pass over the text, so its time is linear.

An answer is marked by ``\boxed{...}`` (also ``\box``, ``\fbox``), by ``#### ...`` at the start of a line, or by
``<answer>...</answer>``. The marker that ends last counts, and only text after the last ``</think>``. If the chat
template writes ``<think>`` before each completion (its prefill), there is no answer before ``</think>``.

The last number of running text has its sign, unit, percent sign, and the formula or list that contains it, because a
part of an expression is not an answer: of ``5 - 3`` or ``3\sqrt2`` the whole is returned. There is none if the text
denies the number (``not 7``, ``at least 7``, ``half of 7``).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlcore.rewards.mathematics.spelling import plainly
from rlcore.rewards.units import separate_unit, with_percent_sign
from rlcore.types import Rollout

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox|box)\s?\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"^[ \t]*####(?!#)(.*)$", re.MULTILINE)
_TAGS = re.compile(r"<answer>|</answer>")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
# The words before a copula, and the copula. The number of words is bounded to keep matching fast.
_LEAD = re.compile(
    r"(?:(?i:so|thus|hence|then|therefore|finally),? )?"
    r"([A-Za-z*](?:[A-Za-z',* -]{0,80}?[A-Za-z*])??) ?(?:\b(?:is|are|was|equals)\b:?|[:=]) ?"
)
# The name of a value: AB = 5, S_{10} = 5, P(A) = 5, \angle ABC = 5, \text{Area} = 5.
_NAMED = re.compile(
    r"(?:(?:[A-Za-z]|\\[a-z]{2,8})(?:_(?:[A-Za-z0-9]|\{[^{}]{1,30}\}))?'{0,3}(?:\( ?[^()=a-z]{1,20} ?\))?|[A-Z]{2,3}"
    r"|\|[A-Z]{2}\||\\overline ?\{ ?[A-Z]{2} ?\}|\\(?:overline|bar|hat|tilde|vec) ?\{ ?[A-Za-z] ?\}|\\angle ?[A-Z]{1,3}"
    r"|\\text\{ ?[A-Za-z ]{1,40}(?P<stop>: ?)?\}) ?(?(stop)|[=:]) ?"
)
# \text{The answer is } 5
_TEXT_LEAD = re.compile(r"\A\\text\{([A-Za-z',* ]{1,80}(?:is|are|was|equals|[:=])) ?\} ?")
_NO_LEAD = re.compile(
    r"\b(?:what|how|which|who|whose|when|where|why|if|find|compute|calculate|solve|let|suppose|not|never|no|neither|or"
    r"|than|least|most|less|more|fewer|about|nearly|almost|half|twice|double|triple|third|quarter|square|cube|root|log"
    r"|exp|sin|cos|tan|sqrt|minus|negative|plus|times|over|percent|wrong|incorrect|false|except|without)\b|n't\b",
    re.IGNORECASE,
)
# 答案是 18
_HAN_LEAD = re.compile(r"(?:[\u3400-\u9fff, ]{1,20}(?:是|为|等于|[:=])|等于) ?(?=[-+$\\0-9.A-Za-z(])")
_NO_HAN_LEAD = re.compile("[不非没約约倍半]|至少|至多|最多|小于|大于|超过|少于|多于|如果|若|设")
# A word too short to name the answer: a variable, or a product of two.
_VARIABLE = re.compile(r"\b(?!(?:an?|of|in|to|my|our|so|I|he|she|it|we|on|at|a)\b)[A-Za-z]{1,2}\b")
_ONE_VARIABLE = re.compile(r"[A-Za-z]")
# Invisible characters, and LaTeX and tags that only lay out their content.
_UNSEEN = re.compile("[\u115f\u1160\u2800\u3164\uffa0]")
_LAYOUT = re.compile(r"\\[A-Za-z]+\*?|\\[,;:! ]|[{}$~^`]|</?(?:answer|think)>|&[a-z]{2,8};")
# Commands that are visible without an argument: letters, sets, values.
_SHOWS = re.compile(
    r"\\(?:(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon"
    r"|phi|chi|psi|omega)|infty|emptyset|varnothing|ell|hbar|aleph|checkmark|top|bot|pm|to|le|ge|lt|gt|ne|neq|leq|geq)"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
# LaTeX for space or size around an answer.
_AT_START = re.compile(
    r"\A(?:\s|\\[,;:! ]|~|\\(?:q?quad|displaystyle|textstyle|large|Large|LARGE|huge|Huge)(?![A-Za-z]))*"
)
_AT_END, _MAX_AT_END = re.compile(r"(?:\s|\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\\\)+\Z"), 60
# Dollar signs around a part of an answer: 20 $cm^2$, not $5 and $6
_DELIMITED = re.compile(r"(?<!\\)\$(?! )([^$]{1,200})(?<![ \\])\$(?![0-9])")
_SET_IN_WORDS = re.compile(
    r"(?:\\text\{ ?)?(?:((?:the set of )?all real(?:s| numbers)|全体实数|任意实数)"
    r"|(?:the )?empty set|no (?:real )?(?:solutions?|roots?)|无解|无实数解|空集)(?: ?\})?",
    re.IGNORECASE,
)
MAX_ANSWER_CHARACTERS = 1_500
MAX_ANSWER_DEPTH = 25
"""Limits on size and nesting of an answer, checked before any parser."""
# LaTeX that takes space and hides its argument.
_ROOM = re.compile(
    r"\\(?:[hv]?phantom|[hv]space\*?|rule|color|label|tag|kern|[hv]skip|textcolor|raisebox) ?(?:\[[^\]]*\])?"
    r"(?: ?\{[^{}]*\}){0,2}|(?<!\\)%[^\n]*|</?[a-z]{1,10}/?>"
    r"|\\(?:null|relax|hfill|hline|newline|par|dots|[lc]dots)(?![A-Za-z])"
)
_MAX_UNWRAPS = 4  # each round reads the text again
# Text between boxes of one list: commas, "and", a few words before it; no word that retracts a box.
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
    """Marked answer; ``inner`` is the position of its content.

    Positions, because the contents of deeply nested boxes together are quadratic in the length of the text.
    """

    kind: str
    start: int
    end: int
    inner: tuple[int, int]


def find_answer(rollout: Rollout, *, last_number_counts: bool, prefill: str = "") -> str | None:
    """Return the answer of a completion as written, or None. ``prefill`` is the chat template's.

    None if a marker after the last answer is unclosed. The last number of a truncated completion may be incomplete and
    does not count.
    """
    text = final_part(prefill + rollout.text)
    if text is None or is_left_open(text):
        return None
    marked = last_marked_answer(text)
    if marked is None and last_number_counts and rollout.finish_reason == "stop":
        return last_number(text)
    return marked


def final_part(text: str) -> str | None:
    """Return the text after the last ``</think>``, or None if a ``<think>`` is still open (truncated thinking)."""
    tail = text.rpartition(_THINK_CLOSE)[2]
    return None if _THINK_OPEN in tail else tail


def required_prefix(prefill: str) -> str:
    """Return the text that must precede an answer: the end of the thinking that the chat template begins."""
    return _THINK_CLOSE if _THINK_OPEN in prefill else ""


def marked_answers(text: str) -> list[Marked]:
    """Return all marked answers of ``text``, ordered by their end."""
    found = [*_boxes(text), *_tagged(text), *_hashed(text)]
    return sorted(found, key=lambda marked: (marked.end, -marked.start))


def last_marked_answer(text: str) -> str | None:
    r"""Return the content of the last marker without blanks: ``$5$`` for ``<answer>\boxed{$5$}</answer>``.

    Boxes that form one list are joined by commas: ``\boxed{2}`` and ``\boxed{3}`` give ``2, 3``.
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


def is_percent_after_box(rollout: Rollout, prefill: str = "") -> bool:
    r"""Return True if a percent sign or word follows the last box: ``$\boxed{20}\%$``."""
    text = final_part(prefill + rollout.text) or ""
    found = marked_answers(text)
    return bool(found) and found[-1].kind == "box" and _PERCENT.match(text, found[-1].end) is not None


def has_content(text: str) -> bool:
    r"""Return True if a text has content besides layout and punctuation: not ``\text{}`` or ``...``."""
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
        for opening, end in _WRAPPERS:
            if len(text) > len(opening) + len(end) and text.startswith(opening) and text.endswith(end):
                text = text[len(opening) : -len(end)].strip()
        if text == before:
            break
    return text


def extract_stated(answer: str) -> str:
    """Return the value that a text states: 18 for ``The answer is 18``, ``Total: 18`` and ``x = 18``.

    Other texts are unchanged, also questions, negations and functions of the wanted value (``log x = 18``).
    """
    han = _HAN_LEAD.match(answer)
    if han is not None and not _NO_HAN_LEAD.search(han.group()):
        return clean(answer[han.end() :])
    named = _NAMED.match(answer)
    if named is not None and not _NO_LEAD.search(named.group()):
        return clean(answer[named.end() :])
    unwrapped = _TEXT_LEAD.sub(r"\1 ", answer)
    match = _LEAD.match(unwrapped)
    if match is None:
        return answer
    lead, rest = match.group(1), unwrapped[match.end() :]
    if not _ONE_VARIABLE.fullmatch(lead) and (_NO_LEAD.search(lead) or _VARIABLE.search(lead)):
        return answer
    return clean(rest.removeprefix("**") if lead.count("**") % 2 else rest)  # **Answer:** 18


def accepted_answers(reference: str) -> list[str]:
    """Return the answers that a reference accepts: the texts of a JSON list, ``["4", "four"]``, or itself."""
    try:
        found: list[str] = json.loads(reference) if reference.startswith('["') else [reference]
    except ValueError:
        return [reference]
    return found if all(isinstance(each, str) for each in found) else [reference]


def find_reference(reference: str) -> str:
    """Return the answer in a reference: its last marked answer, or all of it."""
    marked = last_marked_answer(reference)
    return spelled(reference if marked is None else marked)


def spelled(text: str) -> str:
    """Return an answer without decoration, in plain characters, with signs for percent and for sets named by words."""
    found = with_percent_sign(_DELIMITED.sub(r"\1", clean(plainly(text))))
    words = _SET_IN_WORDS.fullmatch(found)
    return found if words is None else r"\mathbb{R}" if words.group(1) else r"\emptyset"


def brace_depth(text: str) -> int:
    """Return the maximum nesting depth of braces, brackets and parentheses."""
    depth = deepest = 0
    for character in text:
        if character in "{[(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}])":
            depth = max(depth - 1, 0)
    return deepest


def is_left_open(text: str) -> bool:
    """Return True if a marker after the last closed one is never closed."""
    last = max((marked.end for marked in marked_answers(text)), default=0)
    return _OPENED.search(text, last) is not None


def _row_of_boxes(text: str, found: Sequence[Marked]) -> list[str]:
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


_STYLED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox) ?\{([-+0-9., /]{1,40})\}")
_DELIMITER = re.compile(r"\\[()\[\]]")
# x + 7, 7 + x, 7½, 7 is wrong.
_OPERATOR, _TERM = re.compile(r" ?(?:[+*/^]|-(?=[ 0-9]))"), re.compile(r"(?<![A-Za-z'])[A-Za-z] ?$")
_FORMULA_BEHIND = re.compile(
    r"[0-9] ?(?:[+*^] ?(?:[A-Za-z(]|\\(?!circ))|[^\W\d_A-Za-z]*[½⅓⅔¼¾⅕⅛]|is (?:not\b|n't|wrong|incorrect|false))"
)
_BOUND = re.compile(r"[ $]*(?:[<>]|\\(?:le|ge|ne)(?![a-z]))")
_RUN = re.compile(
    r"(?:(?<=[0-9])[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z])"
    r"|[0-9.,:/^+\-*(){}\[\]%$!<> ]|\\(?:[dt]?frac|sqrt|cdot|times|pi|pm|left|right|le|ge|ne|approx|circ|overline)"
    r"(?![A-Za-z])|\\[%$,!])+"
)
_SENTENCE_END = re.compile(r"(?<=[0-9)}%])(?:[.!?;:]+ |[.!?;:,]*$)|(?<![0-9 ]):|, (?![0-9(\\-])|^[^0-9]*[:.;] ")
_AFTER = re.compile(
    r" ?(?:hundred|thousand|million|billion|trillion|dozen|percent|per cent|pct|squared|cubed|and a (?:half|quarter))"
    r"s?(?![A-Za-z])|[万亿千百萬億]{1,2}|(?: ?\\text\{[^{}]{1,30}\}| ?[A-Za-z]{1,12}(?:/[a-z]{1,4})?)(?![A-Za-z])"
)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![A-Za-z])")
_AREA = re.compile(r" ?(?:[mck]?m|ft|in)[²³]")
_NO_ANSWER = re.compile(
    r"(?:\bnot(?: equal to)?|n't|[0-9][A-Za-z%$]{0,12} to|\bnever|\bneither|\bnor"
    r"|\bat (?:least|most)|\b(?:less|more|fewer|greater|other|rather) than|\bup to"
    r"|\b(?:root|half|third|quarter|square|cube|double|twice|triple|logarithm|log|ln|times|divided by|multiplied by)"
    r"(?: of)?) ?$",
    re.IGNORECASE,
)
_MINUS = re.compile(r"\b(?:minus|negative) ?$", re.IGNORECASE)
_VARIABLE_IS = r"[A-Za-z](?:_\{?[0-9]\}?)? ?= ?"
_JOINED = re.compile(
    rf"([0-9][0-9.,/]{{0,40}}) (?:and|or) $"
    rf"|(?<![A-Za-z0-9]){_VARIABLE_IS}(-?[0-9][0-9./]{{0,40}})(?:,? (?:and|or)|,) ?{_VARIABLE_IS}$"
)
# 7 dollars and | 50 cents; 5 x | 3.
_COMPOUND = re.compile(r"[0-9] ?([A-Za-z]+),?(?: and)? $")
_MULTIPLES = re.compile(r"^ ?(?:hundred|thousand|million|billion|trillion|dozen)", re.IGNORECASE)
_MAX_RUN, _CONTEXT = 400, 60


def last_number(text: str) -> str | None:
    """Return the last number, or the formula or list that contains it; None if there is none or it is denied."""
    written = _DELIMITER.sub("$", _STYLED.sub(r"\1", plainly(text))).replace("**", "").replace("\n", " . ")
    found = None
    for match in _RUN.finditer(written):
        if any(map(str.isdecimal, match.group())) and match.group().isascii():
            found = match
    if found is None or found.end() - found.start() > _MAX_RUN:
        return None
    before, run = written[max(found.start() - _CONTEXT, 0) : found.start()], found.group()
    cut = max((end.end() for end in _SENTENCE_END.finditer(run) if re.search("[0-9]", run[end.end() :])), default=0)
    before, run = before + run[:cut], run[cut:]
    if _FORMULA_BEHIND.search(run + written[found.end() : found.end() + _CONTEXT]) or (
        _OPERATOR.match(run) and _TERM.search(before)
    ):
        return None
    glued = re.search(r"[A-Za-z0-9_\\]$", before) is not None and not run.startswith((" ", "$", ":", ",", "."))
    original = run
    run, is_ended = _bare(run.replace("\\$", "").replace("$", "")), run.rstrip("$ ") != run.rstrip("$ ").rstrip(".,!;:")
    lead = before + (" " if original.startswith(" ") else "")
    is_next = re.match(r" ?[$\\]?[-+(]?[0-9.\\(]", original) is not None  # nothing is between it and the previous word
    if glued or not run or (is_next and _NO_ANSWER.search(lead)) or _BOUND.match(original) or original.endswith("+"):
        return None
    if is_next and _MINUS.search(lead):
        run = f"-{run}"
    compound = _COMPOUND.search(lead)
    if is_next and compound is not None and (compound.group(1) in "xX" or _is_unit(compound.group(1))):
        return None
    joined = _JOINED.search(lead) if is_next else None
    other = (joined.group(1) or joined.group(2)).strip(".,") if joined is not None else ""
    if other:
        return f"{other}, {run}"
    is_ended = is_ended or not original.rstrip(" $").replace("$", "").endswith(run)
    return run if is_ended else run + _suffix(run, written[found.end() - len(_trailing(found.group())) :])


def _trailing(run: str) -> str:
    return run[len(run.rstrip(" $")) :]


def _bare(run: str) -> str:
    run = _unstopped(run)
    if re.match(r"- +[0-9.]", run):  # a dash or the bullet of a list
        run = run[1:].strip()
    for opening, closing in ("()", "[]", "{}"):
        while run.count(closing) > run.count(opening) and run:
            head, _, tail = run.partition(closing) if run.startswith(closing) else run.rpartition(closing)
            run = _unstopped(max(head, tail, key=lambda part: sum(map(str.isdecimal, part))))
        while run.count(opening) > run.count(closing) and run:
            head, _, tail = run.rpartition(opening)
            run = _unstopped(tail if re.search("[0-9]", tail) else head)
    return _unstopped(run.strip("*<> ")).rstrip("+-/^\\* ") if re.search("[0-9]", run) else ""


def _unstopped(run: str) -> str:
    return re.sub(r"^(?:[ ,:;!]|\.(?![0-9]))+", "", run).rstrip(" .,:;!")


def _suffix(run: str, rest: str) -> str:
    found, rest = "", rest.replace("$", "")
    if _ORDINAL.match(rest) or _AREA.match(rest):
        return ""
    for _ in range(2):
        match = _AFTER.match(rest, len(found))
        if match is None:
            return found
        word = match.group()
        is_close = not word.startswith(" ")
        is_known = _is_unit(word.strip()) or with_percent_sign(f"5 {word.strip()}") != f"5 {word.strip()}"
        is_known = is_known or re.fullmatch(" [b-zB-HJ-Z]", word) is not None  # a variable
        is_known = is_known or re.fullmatch(r" ?(?:squared|cubed|and a \w+)", word) is not None or "\\text" in word
        if not (is_close or is_known or _MULTIPLES.match(word)):
            return found
        found += word
    return found


def _is_unit(word: str) -> bool:
    return separate_unit(f"5{word}") != f"5{word}"
