"""Replies of the server by themselves."""

from __future__ import annotations

import pytest

from rlcore.tasks.serving.engine import Piece, TokenLogprob
from rlcore.tasks.serving.replies import Gathered, Head, chunk, whole_answer
from rlcore.tasks.serving.requests import read_completion
from tests.quick import within_seconds

HEAD = Head(request=read_completion({"model": "m", "prompt": "x", "logprobs": 0}), id="a", created=0)


@pytest.mark.parametrize("count", [0, 1, 3, 60_000])
def test_a_token_has_its_place_in_the_text(count: int) -> None:
    logprobs = tuple(TokenLogprob("ab", -0.5) for _ in range(count))
    piece = Piece(index=0, text="ab" * count, num_tokens=count, logprobs=logprobs, finish="stop")
    gathered = Gathered()
    gathered.add(piece)
    with within_seconds():
        whole = whole_answer(HEAD, {0: gathered}, 1)["choices"][0]
        streamed = chunk(HEAD, 0, piece, 10)["choices"][0]
    assert whole["logprobs"]["text_offset"] == list(range(0, 2 * count, 2))
    assert streamed["logprobs"]["text_offset"] == list(range(10, 10 + 2 * count, 2))
