"""Reward of the language of a completion, by the script of its letters and by its words.

Words are checked by lists of the most common ones of a few languages. They distinguish no other languages of one
script, no dialects, and no code from prose. Digits and LaTeX commands do not count.
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
        language: Code of ``SCRIPTS``, or ``prompt`` for the script of the last user turn.
        min_words: Words are checked only in completions of at least this length.
        other_language: Factor of the score if the words are of another language.
    """

    language: str = PROMPT
    min_words: NonNegativeInt = 12
    other_language: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.language != PROMPT and self.language not in SCRIPTS:
            known = ", ".join((PROMPT, *SCRIPTS))
            raise ConfigError(f"language = {self.language!r}: must be one of {known}")


class LanguageReward:
    """Fraction of letters in the wanted script, 0..1, times ``other_language`` if the words are of another language."""

    name = "language"

    def __init__(self, options: LanguageOptions | None = None) -> None:
        self._options = options or LanguageOptions()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [scored(self.name, self._value(rollout)) for rollout in rollouts]

    def _value(self, rollout: Rollout) -> float:
        if not has_content(rollout.text):
            return 0.0
        counts = _script_counts(rollout.text)
        scripts = SCRIPTS.get(self._options.language) or _scripts_of_question(rollout)
        is_any = not counts or scripts is None
        share = 1.0 if is_any else sum(counts[script] for script in scripts or ()) / counts.total()
        words = _words(rollout.text)
        is_other = len(words) >= self._options.min_words and _is_other_language(words, self._options.language)
        return share * self._options.other_language if is_other else share


def _scripts_of_question(rollout: Rollout) -> frozenset[str] | None:
    """Return the scripts of most letters in the last user turn; None without letters.

    Japanese has three, but a Chinese prompt gets a Chinese answer.
    """
    question = next((turn.content for turn in reversed(rollout.prompt.messages) if turn.role == "user"), "")
    counts = _script_counts(question)
    if not counts:
        return None
    script = counts.most_common(1)[0][0]
    return SCRIPTS["ja"] if script in _KANA else frozenset({script})


def _is_other_language(words: Sequence[str], language: str) -> bool:
    if language not in STOP_WORDS:
        return False
    counts = Counter(words)
    hits = {name: sum(counts[word] for word in common) for name, common in STOP_WORDS.items()}
    return max(hits.values()) > hits[language]


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
