from __future__ import annotations

import zlib

import pandas as pd
import pytest

from rlcore.data_contracts.drift.sketches import MAX_CATEGORIES, NUM_BUCKETS, bucket_of, script_of, sketch, word_of


def ask(text: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *turns] if system else turns


def test_token_counts_fall_into_two_bins_per_doubling() -> None:
    made = sketch(pd.DataFrame({"prompt_tokens": [0, 1, 2, 3, 4, 5, 6, 9000]}))["prompt_tokens"]
    # Upper edges 1, 2, 3, 4, 6, 8, …: {0, 1}, {2}, {3}, {4}, {5, 6}, …, and one beyond 8192.
    assert made["counts"] == [2, 1, 1, 1, 2, *[0] * 21, 1]
    assert (made["max"], made["mean"]) == (9000.0, 9021 / 8)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, мир", "latin"),
        ("Привет, world и мир", "cyrillic"),
        ("你好吗", "cjk"),
        ("3+4", "(no letters)"),
        ("", "(no letters)"),
    ],
)
def test_a_text_has_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_the_word_of_a_text_is_the_one_with_the_smallest_checksum_in_any_order_and_case() -> None:
    words = ["solve", "the", "equation"]
    smallest = min(words, key=lambda word: zlib.crc32(word.encode()))
    assert word_of("Solve the EQUATION") == word_of("equation, the; solve solve!") == smallest
    assert word_of("?!") == "(no words)"


def test_a_prompt_counts_once_however_many_pairs_it_has() -> None:
    frame = pd.DataFrame(
        {
            "messages": [ask("one two", "be brief"), ask("one two", "be brief"), ask("drei")],
            "prompt_hash": ["x", "x", "y"],
            "prompt_tokens": [4, 4, 2],
            "chosen_tokens": [5, 1, 3],
            "rejected_tokens": [1, 5, 3],
            "margin": [0.0, 0.5, 9.0],
            "probability": [1.0, 0.6, 0.9],
            "source": ["a", "a", "b"],
        }
    )
    made = sketch(frame)
    assert sum(made["prompt_tokens"]["counts"]) == 2
    assert made["turns"]["counts"] == {"1": 1, "2": 1}
    assert made["script"]["counts"] == {"latin": 2}
    # 15 characters, the system turn's among them, in 4 tokens: 3.75; 4 in 2: 2.0.
    assert made["characters_per_token"]["mean"] == pytest.approx((3.75 + 2.0) / 2)
    # The two pairs of the first prompt have half of its weight each.
    assert made["chosen_is"]["counts"] == {"as long": 1, "longer": 0.5, "shorter": 0.5}
    assert made["chosen_tokens"]["counts"][:4] == [0.5, 0, 1, 0]
    assert made["chosen_tokens"]["mean"] == pytest.approx((5 / 2 + 1 / 2 + 3) / 2)
    assert made["margin"]["counts"] == [0.5, 0.5, 0, 0, 0, 0, 1]
    assert made["source"]["counts"] == {"a": 1, "b": 1}


def test_names_beyond_the_most_frequent_are_counted_together() -> None:
    names = [f"n{place:03}" for place in range(MAX_CATEGORIES + 5)] + ["n003"]
    made = sketch(pd.DataFrame({"task": names}))["task"]
    assert next(iter(made["counts"].items())) == ("n003", 2)
    assert (len(made["counts"]), made["others"]) == (MAX_CATEGORIES, 5)
    assert (len(made["buckets"]), sum(made["buckets"])) == (NUM_BUCKETS, len(names))
    assert made["buckets"][bucket_of("n003")] >= 2
    assert "buckets" not in sketch(pd.DataFrame({"task": names[:MAX_CATEGORIES]}))["task"]


def test_the_length_of_references_is_kept() -> None:
    made = sketch(pd.DataFrame({"reference": ["7", "12", "12"]}))["reference_characters"]
    assert made["counts"][:3] == [1, 2, 0]
