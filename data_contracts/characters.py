"""Classes of characters: invisible ones, lookalikes of Latin letters, digits.

The lookalikes are the letters of Unicode's table of confusables (UTS 39) that are common in text: Cyrillic, Greek,
Armenian and the phonetic alphabet.
"""

from __future__ import annotations

import re
import unicodedata

# Format characters (zero-width, soft hyphen, direction marks, tags), variation selectors, fillers, control characters.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_GRAPHIC = re.compile("[!-~]")
_BLANK_SYMBOLS = frozenset("\u2800\ufffc\ufffd")  # empty Braille cell, and placeholders of a lost object or character
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_SMALL = {
    **{"a": "\u0430\u0251\u03b1", "c": "\u0441\u03f2", "d": "\u0501", "e": "\u0435\u04bd", "g": "\u0261"},
    **{"h": "\u04bb\u0570", "i": "\u0456\u0131\u03b9", "j": "\u0458\u03f3", "k": "\u03ba", "l": "\u04cf\u01c0"},
    **{"n": "\u0578", "o": "\u043e\u03bf\u0585", "p": "\u0440\u03c1", "q": "\u051b", "s": "\u0455", "t": "\u03c4"},
    **{"u": "\u03c5\u057d", "v": "\u03bd\u0475", "w": "\u051d\u0461", "x": "\u0445\u03c7", "y": "\u0443\u03b3"},
}
_CAPITAL = {
    **{"A": "\u0410\u0391", "B": "\u0412\u0392", "C": "\u0421\u03f9", "E": "\u0415\u0395", "H": "\u041d\u0397"},
    **{"I": "\u0406\u0399\u04c0", "J": "\u0408", "K": "\u041a\u039a", "M": "\u041c\u039c", "N": "\u039d"},
    **{"O": "\u041e\u039f\u0555", "P": "\u0420\u03a1", "Q": "\u051a", "S": "\u0405", "T": "\u0422\u03a4"},
    **{"W": "\u051c", "X": "\u0425\u03a7", "Y": "\u0423\u03a5", "Z": "\u0396"},
}
_SIGNS = {
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u02d7",
    "*": "\u00d7\u00b7\u22c5\u2219\u2217\u2715",
    "/": "\u00f7\u2044\u2215",
    ":": "\u2236",
    "'": '"`\u00ab\u00b4\u00bb\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2032\u2033\u2039\u203a',
}
_LOOKS = {ord(like): letter for table in (_SMALL, _CAPITAL) for letter, all_like in table.items() for like in all_like}
# Case folding merges a letter's cases: the small lookalike decides if the capital resembles another letter.
_FOLDED = {
    **{ord(like.casefold()): letter.lower() for letter, all_like in _CAPITAL.items() for like in all_like},
    **{ord(like): letter for letter, all_like in _SMALL.items() for like in all_like},
    **{ord(like): sign for sign, all_like in _SIGNS.items() for like in all_like},
}


def has_visible(text: str) -> bool:
    """Return True if a reader sees anything: a letter, digit, mark of punctuation or symbol.

    Blanks, control and zero-width characters, unassigned and private ones, and U+FFFD alone are invisible.
    """
    if "!" <= text[:1] <= "~" or _GRAPHIC.search(text):
        return True
    return any(unicodedata.category(one)[0] in "LNPS" and one not in _BLANK_SYMBOLS for one in without_invisible(text))


def without_invisible(text: str) -> str:
    """Remove characters that take no space."""
    if text.isascii() and text.isprintable():  # most texts; a fifth of the time
        return text
    return _INVISIBLE.sub("", text)


def fold_confusables(text: str) -> str:
    """Replace letters that look like Latin ones by these."""
    return text if text.isascii() else text.translate(_LOOKS)


def folded(text: str) -> str:
    """Fold a text for a question's key: NFKC, no case, Latin lookalikes, plain signs and digits, no invisible ones.

    A superscript stays one: ``2²`` is ``2^2`` and not 22.
    """
    if text.isascii():
        return without_invisible(text).lower().replace('"', "'").replace("`", "'")
    plain = _SUPERSCRIPT.sub(lambda found: "^" + unicodedata.normalize("NFKC", found.group()), text)
    plain = unicodedata.normalize("NFKC", without_invisible(plain)).casefold().translate(_FOLDED)
    return _FOREIGN_DIGIT.sub(lambda found: str(unicodedata.decimal(found.group())), plain)
