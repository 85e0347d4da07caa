"""The language reward: scripts exactly, languages of one script by their common words."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from itertools import combinations

import pytest

from rlcore.errors import ConfigError
from rlcore.rewards.language import (
    LANGUAGES,
    SCRIPTS,
    STOP_WORDS,
    LanguageOptions,
    LanguageReward,
    is_other_language,
    main_script,
    open_identifier,
    script_fraction,
)
from rlcore.types import Message, Rollout
from tests.rlcore.rewards.answers_in_languages import ANSWERS

TEXTS = {
    "en": "First we add the two numbers, and then we see that the sum is seven, which is what was asked.",
    "de": "Zuerst addieren wir die beiden Zahlen, und dann sehen wir, dass die Summe sieben ist und nicht acht.",
    "fr": "Nous additionnons les deux nombres, et nous voyons que le total est sept, donc pas huit.",
    "es": "Sumamos los dos números y entonces vemos que el total es siete, pero hay más por hacer.",
    "it": "Sommiamo i due numeri e quindi vediamo che il totale è sette; per gli altri sono più grandi.",
    "pt": "Somamos os dois números e então vemos que o total são sete, mas não mais do que isso em uma conta.",
    "nl": "Eerst tellen wij de twee getallen op en dus zijn het zeven, niet acht, maar ook van belang voor het geheel.",
    "ru": "Сначала сложим два числа, и тогда получим семь.",
    "zh": "首先我们把两个数字相加，得到七。",
    "ja": "まず二つの数字を足すと、七になります。",
    "ko": "먼저 두 수를 더하면 칠이 됩니다.",
    "el": "Πρώτα προσθέτουμε τους δύο αριθμούς.",
    "ar": "أولا نجمع العددين ونحصل على سبعة.",
    "he": "קודם נחבר את שני המספרים.",
    "hi": "पहले हम दो संख्याओं को जोड़ते हैं।",
    "th": "ขั้นแรกเราบวกเลขสองตัว",
}


def value(make_rollout: Callable[..., Rollout], text: str, **options: object) -> float | None:
    return LanguageReward(LanguageOptions(**options))([make_rollout(text)])[0].value  # type: ignore[arg-type]


@pytest.mark.parametrize("language", sorted(SCRIPTS))
def test_a_text_in_the_wanted_language_scores_one(make_rollout: Callable[..., Rollout], language: str) -> None:
    assert value(make_rollout, TEXTS[language], language=language) == 1.0


@pytest.mark.parametrize("language", sorted(STOP_WORDS))
def test_a_text_in_another_language_of_the_same_script_scores_what_is_set(
    make_rollout: Callable[..., Rollout], language: str
) -> None:
    others = [other for other in sorted(STOP_WORDS) if other != language]
    values = {other: value(make_rollout, TEXTS[other], language=language, other_language=0.25) for other in others}
    assert values == dict.fromkeys(others, 0.25)


def test_the_score_is_the_share_of_letters_of_the_script(make_rollout: Callable[..., Rollout]) -> None:
    """Six Latin letters and two Cyrillic ones: 6/8. Digits, signs and LaTeX commands do not count."""
    assert value(make_rollout, r"answer да 12 + \frac{1}{2}", language="en") == 0.75
    assert value(make_rollout, "12 + 5 = 17", language="en") == 1.0
    assert value(make_rollout, TEXTS["zh"], language="en") == 0.0


@pytest.mark.parametrize("text", ["", " \n", "\u200b\ufeff", "\u3164", "\u2800\u00ad"])
def test_a_text_that_shows_nothing_scores_nothing(make_rollout: Callable[..., Rollout], text: str) -> None:
    assert value(make_rollout, text, language="en") == 0.0
    assert value(make_rollout, text) == 0.0


def test_a_short_text_is_judged_by_its_script_alone(make_rollout: Callable[..., Rollout]) -> None:
    assert value(make_rollout, "und nicht", language="en") == 1.0
    assert value(make_rollout, "und nicht", language="en", min_words=2) == 0.0


def test_with_prompt_the_script_of_the_question_is_wanted(make_rollout: Callable[..., Rollout]) -> None:
    def answered(question: str, answer: str) -> float | None:
        rollout = make_rollout(answer)
        turns = (Message(role="system", content="Отвечай."), Message(role="user", content=question))
        asked = dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, messages=turns))
        return LanguageReward()([asked])[0].value

    assert answered("What is 3 + 4?", "It is seven.") == 1.0
    assert answered("What is 3 + 4?", TEXTS["zh"]) == 0.0
    assert answered(TEXTS["ja"], "七です") == 1.0
    assert answered("3 + 4 = ?", TEXTS["ru"]) == 1.0  # a question without letters asks for no script


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("form", ["short", "sentence", "formula"])
def test_the_library_tells_every_language_that_it_offers_from_all_others(
    make_rollout: Callable[..., Rollout], language: str, form: str
) -> None:
    texts = {code: forms[form] for code, forms in ANSWERS.items()}
    values = {
        wanted: value(make_rollout, texts[language], language=wanted, identifier="py3langid", min_words=3)
        for wanted in LANGUAGES
    }
    if len(re.findall(r"[^\W\d_]+", texts[language])) >= 3:
        assert values == {wanted: float(wanted == language) for wanted in LANGUAGES}
    else:  # a short text without blanks: its script alone decides
        assert values[language] == 1.0


def test_with_prompt_the_library_wants_the_language_of_the_question(make_rollout: Callable[..., Rollout]) -> None:
    def answered(question: str, answer: str) -> float | None:
        rollout = make_rollout(answer)
        turns = (Message(role="user", content=question),)
        asked = dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, messages=turns))
        return LanguageReward(LanguageOptions(identifier="py3langid", min_words=3))([asked])[0].value

    english, german = ANSWERS["en"]["sentence"], ANSWERS["de"]["sentence"]
    assert [answered(english, english), answered(english, german), answered(german, german)] == [1.0, 0.0, 1.0]
    assert answered("3 + 4 = ?", german) == 1.0  # a question without words asks for no language


def test_a_short_word_is_no_proof_of_a_language_and_a_formula_has_none(make_rollout: Callable[..., Rollout]) -> None:
    for text in ("Paris", "12 + 5 = 17", r"\boxed{7}"):
        assert value(make_rollout, text, language="en", identifier="py3langid", min_words=3) == 1.0
        assert value(make_rollout, text, language="en", identifier="py3langid", min_words=0) in (0.0, 1.0)


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    open_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ConfigError, match="pip install py3langid"):
        LanguageReward(LanguageOptions(identifier="py3langid"))


def test_no_word_is_common_in_two_of_the_languages() -> None:
    shared = {(a, b): STOP_WORDS[a] & STOP_WORDS[b] for a, b in combinations(STOP_WORDS, 2)}
    assert {pair: words for pair, words in shared.items() if words} == {}


def test_the_parts_by_themselves() -> None:
    assert main_script("123") is None
    assert script_fraction("", SCRIPTS["en"]) == 1.0
    assert not is_other_language(TEXTS["ru"], "ru")


@pytest.mark.parametrize("identifier", ["words", "py3langid"])
def test_an_unknown_language_is_refused(identifier: str) -> None:
    with pytest.raises(ConfigError, match="must be one of prompt, en, de"):
        LanguageOptions(language="tlh", identifier=identifier)  # type: ignore[arg-type]


def test_finnish_is_offered_by_the_library_alone() -> None:
    assert LanguageOptions(language="fi", identifier="py3langid").language == "fi"
    with pytest.raises(ConfigError, match="must be one of"):
        LanguageOptions(language="fi")
