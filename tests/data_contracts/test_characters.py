from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.characters import fold_confusables, folded, has_visible, without_invisible

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
