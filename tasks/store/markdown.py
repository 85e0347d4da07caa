"""Texts of users and models in Markdown, escaped so that they appear unchanged.

A page is Markdown for MLflow, Prefect and editors, some of which render its HTML. External text therefore passes
through :func:`plain`, :func:`excerpt` or :func:`code`. :func:`on_terminal` undoes it for printed pages.
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
    """Escape a text for Markdown, on one line: markup and HTML appear literally."""
    return _MARKS.sub(r"\\\1", html.escape(_line(text), quote=False))


def excerpt(text: object) -> str:
    """Return the beginning of a text, escaped by :func:`plain`."""
    line = _line(text)
    return plain(line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 1]}…")


def code(text: object) -> str:
    """Format a name or value as code."""
    line = _line(text)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def code_cell(text: object) -> str:
    """Format a name or value as code, for a table."""
    return code(text).replace("|", "\\|")


def on_terminal(page: str) -> str:
    """Return a page for a terminal, without the escapes of :func:`plain`."""
    return html.unescape(_ESCAPED.sub(r"\1", page))


def _line(text: object) -> str:
    """Join a text to one line, without control characters that a terminal would obey."""
    line = " ".join(str(text).split())
    return "".join(_UNKNOWN if unicodedata.category(letter) == "Cc" else letter for letter in line)
