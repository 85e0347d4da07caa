from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.data_contracts.text import normalise, prompt_hash, prompt_key, question_text, visible_form


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_that_differ_in_case_blanks_and_width_alone_are_the_same() -> None:
    assert prompt_hash(ask("What is  1+1?\n")) == prompt_hash(ask(" what IS 1+1？"))  # the last is a full-width mark


def test_prompts_that_differ_in_a_word_or_in_a_role_differ() -> None:
    assert prompt_hash(ask("2 + 3")) != prompt_hash(ask("2 + 4"))
    assert prompt_hash(ask("2 + 3")) != prompt_hash([{"role": "assistant", "content": "2 + 3"}])


def test_another_system_message_does_not_make_another_question() -> None:
    assert prompt_hash([{"role": "system", "content": "be brief"}, *ask("why?")]) == prompt_hash(ask("why?"))


@given(st.text())
def test_normalising_blanks_twice_changes_nothing_more(text: str) -> None:
    assert " ".join(normalise(text).split()) == normalise(text)


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


@given(st.text(st.characters(min_codepoint=9, max_codepoint=126, exclude_characters="&'\"`")))
@example("AA?.0")
def test_what_typing_adds_is_left_out_at_once(text: str) -> None:
    assert question_text(question_text(text)) == question_text(text)


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
