"""Rewards of a completion's language, length and repetition.

Language is judged by the script of letters, and words by lists of the most common ones of a few languages. They
distinguish no other languages of one script, no dialects, and no code from prose. Digits and LaTeX commands do not
count.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from rlcore.config import Fraction, NonNegativeInt, PositiveInt
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


class TextReward:
    """Value of each completion by itself; ``of_nothing`` for an invisible one."""

    def __init__(self, name: str, value: Callable[[Rollout], float], *, of_nothing: float) -> None:
        self.name, self._value, self._of_nothing = name, value, of_nothing

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        values = (self._value(one) if has_content(one.text) else self._of_nothing for one in rollouts)
        return [scored(self.name, value) for value in values]


def language_reward(options: LanguageOptions) -> TextReward:
    """Return the reward of the language, 0..1.

    It is the fraction of letters in the wanted script, times ``other_language`` if the words are of another language.
    """

    def value(rollout: Rollout) -> float:
        counts = _script_counts(rollout.text)
        scripts = SCRIPTS.get(options.language) or _scripts_of_question(rollout)
        is_any = not counts or scripts is None
        share = 1.0 if is_any else sum(counts[script] for script in scripts or ()) / counts.total()
        words = _words(rollout.text)
        is_other = len(words) >= options.min_words and _is_other_language(words, options.language)
        return share * options.other_language if is_other else share

    return TextReward("language", value, of_nothing=0.0)


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


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options of the reward ``length``, in tokens. ``limit`` is usually ``sampling.max_new_tokens``.

    ``buffer`` is the interval before the limit in which the penalty grows.
    """

    limit: PositiveInt
    buffer: PositiveInt

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ConfigError(f"buffer {self.buffer} is longer than limit {self.limit}")


def length_reward(options: LengthOptions) -> TextReward:
    """Return the :func:`overlong_penalty` of the number of sampled tokens, without tool output."""

    def value(rollout: Rollout) -> float:
        return overlong_penalty(sum(rollout.loss_mask), limit=options.limit, buffer=options.buffer)

    return TextReward("length", value, of_nothing=-1.0)


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """Return 0 up to ``limit - buffer`` tokens, then linear to -1 at ``limit``, and -1 beyond.

    This is eq. 13 of DAPO (Yu et al. 2025). ``overlong_penalty(15, limit=20, buffer=10)`` is -0.5.
    """
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)


@dataclass(frozen=True, kw_only=True)
class RepetitionOptions:
    """Options of the reward ``repetition``. ``ngram`` is the length of the compared n-grams, in words."""

    ngram: PositiveInt = 4


def repetition_reward(options: RepetitionOptions) -> TextReward:
    """Return the :func:`repetition_penalty` of a completion, 0 to -1."""

    def value(rollout: Rollout) -> float:
        return repetition_penalty(rollout.text.split(), ngram=options.ngram)

    return TextReward("repetition", value, of_nothing=-1.0)


def repetition_penalty(words: Sequence[str], *, ngram: int) -> float:
    """Return ``distinct n-grams / n-grams - 1``: 0 without repetition, toward -1 (after Yeo et al. 2025, §4.3).

    It is 0 for texts with fewer than two n-grams. ``repetition_penalty("a b a b a b".split(), ngram=2)``: of five pairs
    two are distinct, 2/5 - 1 = -0.6.
    """
    count = len(words) - ngram + 1
    if count < 2:
        return 0.0
    return len({tuple(words[start : start + ngram]) for start in range(count)}) / count - 1.0
