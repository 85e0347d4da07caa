"""Texts of rows: compared as questions, as they look and by what is visible; all as the slow reference does."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts import text
from rlcore.data_contracts.characters import fold_confusables, folded, has_visible, without_invisible
from rlcore.data_contracts.drift import sketches
from rlcore.data_contracts.gate.near_duplicates import BoundedMemo
from rlcore.data_contracts.text import prompt_hash, prompt_key, question_text, visible_form
from tests.reference import data_gate as slow


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_that_differ_in_case_blanks_and_width_alone_are_the_same() -> None:
    assert prompt_hash(ask("What is  1+1?\n")) == prompt_hash(ask(" what IS 1+1？"))  # the last is a full-width mark


def test_prompts_that_differ_in_a_word_or_in_a_role_differ() -> None:
    assert prompt_hash(ask("2 + 3")) != prompt_hash(ask("2 + 4"))
    assert prompt_hash(ask("2 + 3")) != prompt_hash([{"role": "assistant", "content": "2 + 3"}])


def test_another_system_message_does_not_make_another_question() -> None:
    assert prompt_hash([{"role": "system", "content": "be brief"}, *ask("why?")]) == prompt_hash(ask("why?"))


@pytest.mark.parametrize(
    "typed",
    [
        "what is 12 + 10 ?",
        "What is 12+10",
        "WHAT IS 12 + 10???",
        "What\u200b is 1\u200b2 + 10?",
        "\ufeffWhat is 12 + 10?",
        "Wh\u0430t is 12 + 10?",
        "What is １２ ＋ 10？",
        "What is ١٢ + १०?",
        "“What is 12 + 10?”",
        "\"What\" is '12 + 10'?",
        "What is 12 &#43; 10?",
        "What, is: 12 + 10?",
        "**What** is 12 + 10?",
        "What is\n12 + 10 ?\n",
        "(What) is 12 + 10.",
    ],
    ids=ascii,
)
def test_a_question_is_the_same_however_it_is_typed(typed: str) -> None:
    assert question_text(typed) == "what is 12 + 10"
    assert prompt_key(ask(typed)) == prompt_key(ask("What is 12 + 10?"))
    assert prompt_key(ask(typed), is_exact=True) != prompt_key(ask("What is 12 + 10?"), is_exact=True)


DIFFERENT = [
    *[("4+3", "4-3"), ("4*3", "4+3"), ("43", "4 3"), ("-5", "5"), ("5!", "5"), ("3.5", "35"), ("(1,2)", "12")],
    *[("2*(3+4)", "2*3+4"), ("f'(2)", "f(2)"), ("x²", "x2"), ("2²", "22"), ("50%", "50"), ("$5", "5")],
    *[("2, ?, 8", "2, 8, ?"), ("([)]", "([])"), ("C++", "C"), ("C#", "C"), ("x < y", "x > y"), ("a/b", "ab")],
    *[("año", "ano"), ("हिन्दी", "हन्द"), ("今天", "明天"), ("|x|", "x"), ("3:4", "3 4"), ("x_1", "x1"), ("{a}", "a")],
    *[("1,000", "1.000"), ("5'", "5"), ("not a word", "a word"), ("#..#", "##.."), ("~x", "x"), ("a b", "b a")],
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=ascii)
def test_operators_numbers_and_words_keep_questions_apart(one: str, other: str) -> None:
    assert question_text(one) != question_text(other)
    assert prompt_key(ask(f"What is {one} here")) != prompt_key(ask(f"What is {other} here"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("good  answer ", "good answer", True),
        ("good answer", "good\u200b answer", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("good", "g\u043e\u043ed", True),
        ("a\r\nb", "a\nb\n", True),
        ("a\nb", "a b", False),
        ("Good", "good", False),
        ("good.", "good", False),
        ("x²", "x2", False),
    ],
)
def test_answers_look_the_same_where_a_reader_cannot_tell_them_apart(one: str, other: str, same: bool) -> None:
    assert (visible_form(one) == visible_form(other)) is same


# Format characters that have a shape of their own: number signs and the like.
SHAPED = {0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x600, 0x606), *range(0x13430, 0x13440)}


def test_every_format_character_of_unicode_is_invisible_but_those_with_a_shape() -> None:
    formats = {code for code in range(0x20000) if unicodedata.category(chr(code)) == "Cf"}
    kept = {code for code in formats if without_invisible(chr(code))}
    assert kept <= SHAPED
    assert formats - kept >= {0xAD, 0x61C, 0x200B, 0x200D, 0x202E, 0x2060, 0xFEFF}


def test_letters_digits_blanks_and_accents_are_not_taken_for_invisible() -> None:
    text = "a1 \n\t.,é\u0301ا한漢🙂\u3000"
    assert without_invisible(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *["", " \u3000\n", "\u200b\u200d", "\ufeff", "\xad", "\ue000\uf8ff", "\ufffd", "\u2800", "\u3164", "\u0301"],
        *["\x07", "\U000e0041", "\ufe0f", "\u115f\u1160", "\u202e\u202c", "\U000f0000", "\u0378"],
    ],
    ids=ascii,
)
def test_a_text_without_anything_to_see_is_blank(text: str) -> None:
    assert not has_visible(text)
    assert has_visible(f"{text}x{text}")


@pytest.mark.parametrize("text", ["a", ".", "7", "é", "ا", "漢", "🙂", "€", "\u0301e", "…", "한"], ids=ascii)
def test_a_letter_digit_mark_or_symbol_is_seen(text: str) -> None:
    assert has_visible(text)


def test_letters_that_look_latin_are_read_as_latin_in_their_own_case() -> None:
    assert fold_confusables("Неllо, раураl") == "Hello, paypal"
    assert fold_confusables("жизнь") == "жизнь"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Wh\u200bat", "what"),
        ("ＷＨＡＴ　２２", "what 22"),
        ("Whаt іs", "what is"),  # Cyrillic a and i
        ("٢٢ + ३", "22 + 3"),
        ("“a” «b» `c`", "'a' 'b' 'c'"),
        ("4 − 3 × 2 ÷ 1", "4 - 3 * 2 / 1"),
        ("2²", "2^2"),
        ("x¹⁰", "x^10"),
        ("ﬁne", "fine"),
    ],
)
def test_a_text_is_folded_to_plain_letters_signs_and_digits(text: str, plain: str) -> None:
    assert folded(text) == plain


@given(st.text("ΑΒΕΝΥαβενυВвНнРрСсАа", max_size=8))
def test_folding_knows_no_case_in_any_script(text: str) -> None:
    assert folded(text.upper()) == folded(text.lower())


MARKS = st.sampled_from([*"abI09 .,;:!?'\"`()-+*/&_#\n\t\x00\x0b\u200b", " '", "&amp;", "ß", "漢", "а", "é", "２", "²"])
REFERENCE_TEXTS = st.one_of(
    st.lists(MARKS, max_size=24).map("".join), st.text(st.characters(exclude_categories=["Cs"]))
)


def test_a_text_is_worked_out_once_and_all_is_forgotten_when_it_is_full() -> None:
    asked: list[str] = []
    found = BoundedMemo(lambda one: asked.append(one) or len(one), most=2)  # type: ignore[func-returns-value]
    assert list(map(found.__getitem__, ["a", "bb", "a", "bb"])) == [1, 2, 1, 2]
    assert asked == ["a", "bb"]
    assert found["ccc"] == 3
    assert dict(found) == {"ccc": 3}


@settings(deadline=None, max_examples=100)
@given(REFERENCE_TEXTS)
def test_texts_are_compared_hashed_and_sketched_as_the_reference_does(one: str) -> None:
    assert text.question_text(one) == slow.question_text(one)
    assert text.hashes_of_words(one) == slow.hashes(slow.words_of(one))
    assert (sketches.script_of(one), sketches.word_of(one)) == (slow.script_of(one), slow.word_of(one))
