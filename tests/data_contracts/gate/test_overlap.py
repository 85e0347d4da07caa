"""Runs of 13 words that training rows share with evaluation prompts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.contracts import demonstrations
from rlcore.data_contracts.gate.overlap import FEWEST_WORDS, NGRAM_WORDS, Overlap, texts_of
from rlcore.data_contracts.text import words_of

TEXTS = st.lists(st.lists(st.sampled_from("ab"), max_size=40).map(" ".join), max_size=6)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_run_is_found_in_any_place_and_its_prompt_is_counted_once() -> None:
    run = " ".join(f"w{place}" for place in range(NGRAM_WORDS))
    overlap = Overlap([ask(f"before {run} after"), ask("w1 w2 w3"), ask(run.upper())])
    assert overlap.see([["nothing of it"], [f"{run} and {run}"]]).keys() == {1}
    assert overlap.see([[run]]).keys() == {0}
    assert (overlap.num_touched, overlap.num_prompts) == (2, 3)


def test_a_run_does_not_go_from_one_text_or_row_to_the_next() -> None:
    words = [f"w{place}" for place in range(NGRAM_WORDS)]
    whole, parts = " ".join(words), [" ".join(words[:6]), " ".join(words[6:])]
    overlap = Overlap([ask(whole)])
    assert overlap.see([[parts[0]], [parts[1]], parts, ["", *parts]]) == {}
    assert overlap.num_touched == 0


def test_a_row_teaches_its_turns_and_its_answer_and_not_the_instruction_of_the_system() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    row = {"messages": turns, "completion": "said"}
    assert texts_of(row, demonstrations.CONTRACT) == ["user", "assistant", "user", "said"]


def test_a_shorter_prompt_stands_whole_in_a_row_from_eight_words_on() -> None:
    words = [f"w{place}" for place in range(FEWEST_WORDS)]
    overlap = Overlap([ask(" ".join(words)), ask(" ".join(words[1:]))])
    assert overlap.see([[" ".join(words[1:])], [f"so {' '.join(words)}, it says"]]) == {1: 0}
    assert overlap.num_touched == 1  # the second has seven words, a phrase


def test_another_length_may_be_asked_for() -> None:
    words = [f"w{place}" for place in range(NGRAM_WORDS)]
    overlap = Overlap([ask(" ".join(words))], size=9)
    assert overlap.see([[" ".join(words[:8])], [" ".join(words[3:12])]]) == {1: 0}


def touches(text: str, train: str, size: int) -> bool:
    """A plain search: a run of ``size`` words of ``text``, or all of it, stands in ``train``."""
    length = min(size, len(words_of(text)))
    found, known = (
        {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
        for words in map(words_of, (text, train))
    )
    return length >= FEWEST_WORDS and bool(found & known)


@settings(deadline=None)
@given(TEXTS, TEXTS, st.integers(FEWEST_WORDS, NGRAM_WORDS))
def test_what_is_found_is_that_of_a_plain_search(held_out: list[str], train: list[str], size: int) -> None:
    overlap = Overlap([ask(text) for text in held_out], size=size)
    found = overlap.see([[text] for text in train])
    pairs = {
        (row, prompt)
        for row, text in enumerate(train)
        for prompt, other in enumerate(held_out)
        if touches(other, text, size)
    }
    assert found.keys() == {row for row, _ in pairs}
    assert {*found.items()} <= pairs
    assert overlap.num_touched == len({prompt for _, prompt in pairs})
