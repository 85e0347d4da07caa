from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from data_contracts.text import normalise, prompt_hash, word_ngrams


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


def test_runs_of_words_slide_by_one() -> None:
    assert list(word_ngrams("One, two; THREE four", 3)) == ["one two three", "two three four"]
    assert list(word_ngrams("one two", 3)) == []
