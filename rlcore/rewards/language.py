"""Reward of the language of a completion, by the script of its letters and by its words.

Words are checked by lists of the most common ones of a few languages, which cannot distinguish other languages of one
script (Finnish and Turkish), or by a library that knows many (:mod:`rlcore.rewards.language`). Neither
distinguishes dialects, or code from prose.

Mathematics, digits and LaTeX commands do not count. A completion without letters scores 1, because nothing in it is in
another language. An invisible completion scores 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from rlcore.config import Fraction, NonNegativeInt
from rlcore.errors import ConfigError
from rlcore.rewards.answers import has_content
from rlcore.rewards.base import scored
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
# fmt: off - per language: words that are common in it and not in the others
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
    """Options of the reward ``language``.

    Attributes:
        language: Code, or ``prompt`` for the language of the last user turn: its script, or the result of
            ``identifier``.
        identifier: ``words`` uses the most common words of the languages of ``STOP_WORDS``, for texts of a dozen words
            or more. ``py3langid`` uses that library, for the languages of ``LANGUAGES`` and texts of three words or
            more.
        min_words: Words are checked only in completions of at least this length.
        other_language: Factor of the score if the words are of another language.
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
    """Fraction of letters in the wanted script, 0..1, times ``other_language`` if the words are of another language.

    Raises:
        ConfigError: The library that ``identifier`` names is not installed.
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
        question = next((turn.content for turn in reversed(rollout.prompt.messages) if turn.role == "user"), "")
        language = self._wanted(question)
        scripts = _scripts_of(language, question)
        share = 1.0 if scripts is None else script_fraction(rollout.text, scripts)
        return share * self._options.other_language if self._is_other(rollout.text, language) else share

    def _wanted(self, question: str) -> str:
        """Return the code of the wanted language; empty if only its script is known."""
        if self._options.language != PROMPT:
            return self._options.language
        return self._identify(question) if self._identify and self._has_words(question) else ""

    def _is_other(self, text: str, language: str) -> bool:
        if not language or not self._has_words(text):
            return False
        return self._identify(text) != language if self._identify else is_other_language(text, language)

    def _has_words(self, text: str) -> bool:
        return len(_words(text)) >= max(1, self._options.min_words)


def _scripts_of(language: str, question: str) -> frozenset[str] | None:
    """Return the scripts of the wanted language; None if any is accepted."""
    if not language:
        script = main_script(question)
        return None if script is None else _companions(script)
    return SCRIPTS.get(language) or frozenset({_OTHER_SCRIPTS.get(language, "LATIN")})


def script_fraction(text: str, scripts: frozenset[str]) -> float:
    """Return the fraction of letters in ``text`` that belong to one of ``scripts``; 1 without letters."""
    counts = _script_counts(text)
    total = counts.total()
    return sum(counts[script] for script in scripts) / total if total else 1.0


def main_script(text: str) -> str | None:
    """Return the script of most letters in ``text``; None without letters."""
    counts = _script_counts(text)
    return counts.most_common(1)[0][0] if counts else None


def is_other_language(text: str, language: str) -> bool:
    """Return True if another language's common words are more frequent in ``text`` than those of ``language``."""
    if language not in STOP_WORDS:
        return False
    words = Counter(_words(text))
    hits = {name: sum(words[word] for word in common) for name, common in STOP_WORDS.items()}
    return max(hits.values()) > hits[language]


def _companions(script: str) -> frozenset[str]:
    """Return the scripts that may occur together: Japanese has three, but a Chinese prompt gets a Chinese answer."""
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


# Candidate languages, each tested on answers of three words and more. Without this restriction, one of the
# hundred others wins for some short texts.
# fmt: off
LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "fi", "pl", "cs", "hu", "ro", "tr", "vi", "id", "ru", "uk",
    "bg", "el", "ar", "fa", "he", "hi", "th", "ko", "zh", "ja",
)
# fmt: on
_NO_LANGUAGE = re.compile(r"\\[A-Za-z]+|[\d$+=^_{}*/\\<>|&#~\[\]()-]+")  # LaTeX commands, digits, signs


@lru_cache(maxsize=1)
def open_identifier() -> Callable[[str], str]:
    """Return a deterministic function that maps a text to its most likely code of ``LANGUAGES``.

    Loading takes a second and 120 MiB once per process; a text of a few hundred words takes half a millisecond.

    Raises:
        ConfigError: py3langid is not installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            'identifier = "py3langid" needs the package py3langid, which is not installed',
            where="the reward language",
            fix="pip install py3langid, or identifier = 'words'",
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(list(LANGUAGES))

    def identify(text: str) -> str:
        return str(identifier.classify(" ".join(_NO_LANGUAGE.sub(" ", text).split()))[0])

    return identify
