"""Runs of 13 words that training prompts share with evaluation prompts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.overlap import NGRAM_WORDS, Overlap
from data_contracts.text import word_ngrams

TEXTS = st.lists(st.lists(st.sampled_from("ab"), max_size=40).map(" ".join), max_size=6)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_run_is_found_in_any_place_and_its_prompt_is_counted_once() -> None:
    run = " ".join(f"w{place}" for place in range(NGRAM_WORDS))
    overlap = Overlap([ask(f"before {run} after"), ask("w1 w2 w3"), ask(run.upper())])
    overlap.see([ask("nothing of it"), ask(f"{run} and {run}")])
    overlap.see([ask(run)])
    assert (overlap.num_touched, overlap.num_prompts) == (2, 3)


def test_a_run_does_not_go_from_one_turn_or_prompt_to_the_next_and_answers_do_not_count() -> None:
    words = [f"w{place}" for place in range(NGRAM_WORDS)]
    whole, parts = " ".join(words), [" ".join(words[:6]), " ".join(words[6:])]
    overlap = Overlap([ask(whole)])
    overlap.see([ask(parts[0]), ask(parts[1])])
    overlap.see([[*ask(parts[0]), *ask(parts[1])], [{"role": "assistant", "content": whole}, *ask("x")]])
    assert overlap.num_touched == 0


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_the_count_is_that_of_a_plain_search(held_out: list[str], train: list[str]) -> None:
    overlap = Overlap([ask(text) for text in held_out])
    overlap.see([ask(text) for text in train])
    seen = {ngram for text in train for ngram in word_ngrams(text, NGRAM_WORDS)}
    assert overlap.num_touched == sum(bool(seen & set(word_ngrams(text, NGRAM_WORDS))) for text in held_out)
