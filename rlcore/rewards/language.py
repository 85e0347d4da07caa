"""Is a completion in the wanted language? The script of its letters, and for a few languages its most common words.

What this cannot tell: languages of one script without a list of words (Finnish from Turkish), dialects, code from
prose.
Mathematics, digits and LaTeX commands have no language and do not count. A completion without letters scores 1: there
is nothing in another language in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from rlcore.config import Fraction, NonNegativeInt
from rlcore.errors import ConfigError
from rlcore.rewards.base import graded
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
    """``language``: a code of ``SCRIPTS``, or ``prompt`` for the script in which the last user turn is mostly written.

    Where the language has a list of common words, and the completion ``min_words`` words or more, these decide too:
    if another language's common words are more frequent, the score is multiplied by ``other_language``.
    """

    language: str = PROMPT
    min_words: NonNegativeInt = 12
    other_language: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.language != PROMPT and self.language not in SCRIPTS:
            known = ", ".join((PROMPT, *SCRIPTS))
            raise ConfigError(f"language = {self.language!r}: must be one of {known}")


class LanguageReward:
    """The share of letters in the wanted script, 0..1, times ``other_language`` where the words speak against it."""

    name = "language"

    def __init__(self, options: LanguageOptions | None = None) -> None:
        self._options = options or LanguageOptions()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [graded(self.name, self._value(rollout)) for rollout in rollouts]

    def _value(self, rollout: Rollout) -> float:
        options = self._options
        if options.language != PROMPT:
            share = script_share(rollout.text, SCRIPTS[options.language])
            is_other = len(_words(rollout.text)) >= options.min_words and speaks_another(rollout.text, options.language)
            return share * options.other_language if is_other else share
        asked = next((turn.content for turn in reversed(rollout.prompt.messages) if turn.role == "user"), "")
        script = main_script(asked)
        return 1.0 if script is None else script_share(rollout.text, _companions(script))


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
