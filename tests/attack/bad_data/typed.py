"""One question typed in other ways: a person, or a normaliser, sees the same one."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Mapping

from tests.attack.bad_data.case import QUESTIONS

FARMER = QUESTIONS[6]
ACCENTED = "How much is a caf\u00e9 cr\u00e8me and 2 croissants?"
_CYRILLIC = str.maketrans("aeopcxyi", "\u0430\u0435\u043e\u0440\u0441\u0445\u0443\u0456")
_GREEK = str.maketrans("aopvu", "\u03b1\u03bf\u03c1\u03bd\u03c5")
_FULL = {code: code + 0xFEE0 for code in range(0x21, 0x7F)} | {0x20: 0x3000}
_DIGITS = {
    name: {48 + digit: first + digit for digit in range(10)}
    for name, first in {"Arabic": 0x660, "Persian": 0x6F0, "Devanagari": 0x966, "Bengali": 0x9E6, "Thai": 0xE50}.items()
}


def every(mark: str) -> Callable[[str], str]:
    """A mark after each letter of a text."""
    return lambda text: "".join(one + mark if one.isalpha() else one for one in text)


def within(mark: str) -> Callable[[str], str]:
    """A mark in the middle of a text's longest word."""

    def typed(text: str) -> str:
        word = max(text.split(), key=len)
        return text.replace(word, word[: len(word) // 2] + mark + word[len(word) // 2 :])

    return typed


TYPED: Mapping[str, Callable[[str], str]] = {
    "zero-width space": within("\u200b"),
    "zero-width joiners": every("\u200d"),
    "word joiner": within("\u2060"),
    "byte order mark": lambda text: "\ufeff" + text,
    "soft hyphens": every("\xad"),
    "variation selector": within("\ufe0f"),
    "tag characters": within("\U000e0061"),
    "direction marks": lambda text: f"\u202d{text}\u202c",
    "grapheme joiner": within("\u034f"),
    "control character": within("\x7f"),
    "Cyrillic letters": lambda text: text.translate(_CYRILLIC),
    "Greek letters": lambda text: text.translate(_GREEK),
    "full width": lambda text: text.translate(_FULL),
    "mathematical letters": lambda text: "".join(
        chr(0x1D41A + ord(one) - 97) if "a" <= one <= "z" else one for one in text
    ),
    "capitals": str.upper,
    "small letters": str.lower,
    "doubled blanks": lambda text: text.replace(" ", "  "),
    "hard blanks": lambda text: text.replace(" ", "\xa0"),
    "line ends": lambda text: text.replace(" ", "\n", 2) + "\n",
    "no mark at the end": lambda text: text.rstrip("?."),
    "a blank before the mark": lambda text: f"{text[:-1]} {text[-1]}",
    "another mark": lambda text: text[:-1] + "...",
    "three marks": lambda text: text[:-1] + "???",
    "commas": lambda text: text.replace(" ", ", ", 1),
    "quotes around it": lambda text: f'"{text}"',
    "curly quotes": lambda text: f"\u201c{text}\u201d",
    "guillemets": lambda text: f"« {text} »",
    "a word in quotes": lambda text: text.replace(text.split()[2], f"'{text.split()[2]}'", 1),
    "a word in brackets": lambda text: text.replace(text.split()[1], f"({text.split()[1]})", 1),
    "bold": lambda text: text.replace(text.split()[1], f"**{text.split()[1]}**", 1),
    "decomposed accents": lambda text: unicodedata.normalize("NFD", text),
    "HTML numbers": lambda text: "".join(f"&#{ord(one)};" if one in "aeiou" else one for one in text),
    "HTML hard blanks": lambda text: text.replace(" ", "&nbsp;", 1),
    "HTML quotes": lambda text: html.escape(f'"{text}"'),
    **{f"digits: {name}": (lambda text, table=table: text.translate(table)) for name, table in _DIGITS.items()},
}

INVISIBLE: Mapping[str, str] = {
    "empty": "",
    "blanks": " \t\n",
    "hard and wide blanks": "\xa0\u3000\u2003",
    "zero-width space": "\u200b",
    "joiners": "\u200c\u200d",
    "byte order mark": "\ufeff",
    "soft hyphen": "\xad",
    "private use": "\ue000\uf8ff",
    "private planes": "\U000f0000\U00100000",
    "replacement character": "\ufffd",
    "variation selectors": "\ufe0f\ufe0e",
    "tag characters": "\U000e0041\U000e0042",
    "direction marks": "\u202e\u202c\u200f",
    "Hangul filler": "\u3164\u115f",
    "empty Braille": "\u2800",
    "accents alone": "\u0301\u0308",
    "unassigned": "\u0378\U000e0fff",
    "control characters": "\x01\x1b\x7f",
}
