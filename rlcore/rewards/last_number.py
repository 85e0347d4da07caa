r"""Last number of running text, with its sign, unit, percent sign, and the formula or list that contains it.

A part of an expression is not an answer: of ``5 - 3``, ``12:30``, ``(2, 3)`` and ``3\sqrt2`` the whole is returned. If
the text denies the number (``not 7``, ``at least 7``, ``half of 7``), there is none.
"""

from __future__ import annotations

import re

from rlcore.rewards.mathematics.spelling import plainly
from rlcore.rewards.units import separate_unit, with_percent_sign

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
_VARIABLE = r"[A-Za-z](?:_\{?[0-9]\}?)? ?= ?"
_JOINED = re.compile(
    rf"([0-9][0-9.,/]{{0,40}}) (?:and|or) $"
    rf"|(?<![A-Za-z0-9]){_VARIABLE}(-?[0-9][0-9./]{{0,40}})(?:,? (?:and|or)|,) ?{_VARIABLE}$"
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
    """Return a run without surrounding blanks, stops, bullets and unpaired brackets."""
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
    """Return the suffix that belongs to the number: a multiple, a percent sign, a known unit, a variable."""
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
