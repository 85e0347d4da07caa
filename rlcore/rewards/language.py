"""Is a completion in the wanted language? The script of its letters, and its words.

Its words are judged by lists of the most common ones of a few languages, which cannot tell other languages of one
script apart (Finnish from Turkish), or by a library that knows many (:mod:`rlcore.rewards.language_identifier`).
Neither tells dialects, or code from prose.
Mathematics, digits and LaTeX commands have no language and do not count. A completion without letters scores 1: there
is nothing in another language in it. One that shows nothing at all scores 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from rlcore.config import Fraction, NonNegativeInt
from rlcore.errors import ConfigError
from rlcore.rewards.answers import has_content
from rlcore.rewards.base import scored
from rlcore.rewards.language_identifier import LANGUAGES, open_identifier
from rlcore.types import Rollout, Score

PROMPT = "prompt"
_LATEX = re.compile(r"\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_HAN, _KANA = "CJK", ("HIRAGANA", "KATAKANA")

# Scripts by language: the first word of the Unicode names of its letters.
SCRIPTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl"), frozenset({"LATIN"})),
        "ru": frozenset({"CYRILLIC"}),
        "el": frozenset({"GREEK"}),
        "ar": frozenset({"ARABIC"}),
        "he": frozenset({"HEBREW"}),
        "hi": frozenset({"DEVANAGARI"}),
        "th": frozenset({"THAI"}),
        "ko": frozenset({"HANGUL"}),
        "zh": frozenset({_HAN}),
        "ja": frozenset({_HAN, *_KANA}),
    }
)
_OTHER_SCRIPTS = MappingProxyType({"uk": "CYRILLIC", "bg": "CYRILLIC", "fa": "ARABIC"})  # and LATIN of all the rest
# fmt: off - a line per language: words that are common in it and not in the others
STOP_WORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "en": frozenset(
            ("the", "and", "of", "is", "that", "it", "with", "this", "are", "was", "have", "we", "then", "which")
        ),
        "de": frozenset(
            ("der", "und", "ist", "nicht", "das", "ein", "eine", "mit", "wir", "sich", "auf", "dann", "sind")
        ),
        "fr": frozenset(("le", "et", "est", "les", "des", "une", "dans", "qui", "nous", "pour", "pas", "donc", "avec")),
        "es": frozenset(("el", "y", "los", "las", "por", "una", "como", "entonces", "pero", "más", "del", "hay")),
        "it": frozenset(("il", "di", "che", "è", "gli", "della", "sono", "quindi", "anche", "per", "nel", "più")),
        "pt": frozenset(("o", "os", "não", "uma", "com", "são", "então", "mas", "em", "ao", "mais", "dos")),
        "nl": frozenset(("de", "het", "een", "van", "niet", "zijn", "voor", "wij", "dus", "ook", "maar", "naar")),
    }
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    """``language``: a code, or ``prompt`` for that of the last user turn: its script, or what ``identifier`` finds.

    A completion of ``min_words`` words or more is judged by its words too: where they are another language's, the
    score is multiplied by ``other_language``. ``identifier`` says how they are judged. ``words``: by the most common
    words of the languages of ``STOP_WORDS``; it is for texts of a dozen words and more. ``py3langid``: by the library
    of that name, for the languages of ``LANGUAGES``; it is for texts of three words and more.
    """

    language: str = PROMPT
    identifier: Literal["words", "py3langid"] = "words"
    min_words: NonNegativeInt = 12
    other_language: Fraction = 0.0

    def __post_init__(self) -> None:
        codes = SCRIPTS if self.identifier == "words" else LANGUAGES
        if self.language != PROMPT and self.language not in codes:
            known = ", ".join((PROMPT, *codes))
            raise ConfigError(f"language = {self.language!r}: must be one of {known}")


class LanguageReward:
    """The share of letters in the wanted script, 0..1, times ``other_language`` where the words speak against it.

    Raises:
        ConfigError: the library that ``identifier`` names is not installed.
    """

    name = "language"

    def __init__(self, options: LanguageOptions | None = None) -> None:
        self._options = options or LanguageOptions()
        self._identify = None if self._options.identifier == "words" else open_identifier()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [scored(self.name, self._value(rollout)) for rollout in rollouts]

    def _value(self, rollout: Rollout) -> float:
        if not has_content(rollout.text):
            return 0.0
        asked = next((turn.content for turn in reversed(rollout.prompt.messages) if turn.role == "user"), "")
        language = self._wanted(asked)
        scripts = _scripts_of(language, asked)
        share = 1.0 if scripts is None else script_share(rollout.text, scripts)
        return share * self._options.other_language if self._is_other(rollout.text, language) else share

    def _wanted(self, asked: str) -> str:
        """The code of the wanted language; empty where the question says no more than a script."""
        if self._options.language != PROMPT:
            return self._options.language
        return self._identify(asked) if self._identify and self._has_words(asked) else ""

    def _is_other(self, text: str, language: str) -> bool:
        if not language or not self._has_words(text):
            return False
        return self._identify(text) != language if self._identify else speaks_another(text, language)

    def _has_words(self, text: str) -> bool:
        return len(_words(text)) >= max(1, self._options.min_words)


def _scripts_of(language: str, asked: str) -> frozenset[str] | None:
    """The scripts of the wanted language; None where any will do."""
    if not language:
        script = main_script(asked)
        return None if script is None else _companions(script)
    return SCRIPTS.get(language) or frozenset({_OTHER_SCRIPTS.get(language, "LATIN")})


def script_share(text: str, scripts: frozenset[str]) -> float:
    """The share of letters in ``text`` that belong to one of ``scripts``; 1 where there is no letter."""
    counts = _script_counts(text)
    total = counts.total()
    return sum(counts[script] for script in scripts) / total if total else 1.0


def main_script(text: str) -> str | None:
    """The script of most letters in ``text``; None where there is no letter."""
    counts = _script_counts(text)
    return counts.most_common(1)[0][0] if counts else None


def speaks_another(text: str, language: str) -> bool:
    """Whether another language's common words are more frequent in ``text`` than those of ``language``."""
    if language not in STOP_WORDS:
        return False
    words = Counter(_words(text))
    hits = {name: sum(words[word] for word in common) for name, common in STOP_WORDS.items()}
    return max(hits.values()) > hits[language]


def _companions(script: str) -> frozenset[str]:
    """Japanese is written in three scripts; a prompt in Chinese characters alone may be answered in Chinese alone."""
    return SCRIPTS["ja"] if script in _KANA else frozenset({script})


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _LETTERS.findall(_LATEX.sub(" ", text))]


def _script_counts(text: str) -> Counter[str]:
    counts = Counter[str]()
    for character, count in Counter("".join(_LETTERS.findall(_LATEX.sub(" ", text)))).items():
        counts[_script(character)] += count
    return counts


@lru_cache(maxsize=4096)
def _script(character: str) -> str:
    return unicodedata.name(character, "UNKNOWN").split(" ")[0].split("-")[0]
