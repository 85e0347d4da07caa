"""Words of users and of models in Markdown: they stand there as text, whatever they hold.

A page is Markdown for MLflow, Prefect and editors, some of which render HTML in it. So text that is not ours goes
through :func:`plain`, :func:`excerpt` or :func:`code`. :func:`on_terminal` undoes it where a page is only printed.
"""

from __future__ import annotations

import html
import re
import unicodedata

_MARKS = re.compile(r"([\\`*_\[\]|~#])")
_ESCAPED = re.compile(r"\\([\\`*_\[\]|~#])")
_EXCERPT = 160  # characters
_UNKNOWN = "\ufffd"


def plain(text: object) -> str:
    """Words as Markdown shows them, on one line: what it would read as marks or as HTML stands as itself."""
    return _MARKS.sub(r"\\\1", html.escape(_line(text), quote=False))


def excerpt(text: object) -> str:
    """The beginning of a text, as :func:`plain` writes it."""
    line = _line(text)
    return plain(line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 1]}…")


def code(text: object) -> str:
    """A name or value in the letters of code."""
    line = _line(text)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def code_cell(text: object) -> str:
    """A name or value in the letters of code, for a table."""
    return code(text).replace("|", "\\|")


def on_terminal(page: str) -> str:
    """A page as it is printed, with what :func:`plain` has escaped as it was."""
    return html.unescape(_ESCAPED.sub(r"\1", page))


def _line(text: object) -> str:
    """One line, without the control characters that a terminal would obey."""
    line = " ".join(str(text).split())
    return "".join(_UNKNOWN if unicodedata.category(letter) == "Cc" else letter for letter in line)
