"""Replies by themselves."""

from __future__ import annotations

import json

import pytest

from rlcore.openai_api.replies import Piece, Reply, TokenLogprob
from rlcore.openai_api.requests import Options
from tests.quick import within_seconds

REPLY = Reply(options=Options(model="m", top_logprobs=0), is_chat=False, num_prompt_tokens=1)


@pytest.mark.parametrize("count", [0, 1, 3, 60_000])
def test_a_token_has_its_place_in_the_text(count: int) -> None:
    logprobs = tuple(TokenLogprob("ab", -0.5) for _ in range(count))
    piece = Piece(index=0, text="ab" * count, num_tokens=count, logprobs=logprobs, finish="stop")
    with within_seconds():
        whole = REPLY.whole([piece])["choices"][0]
        (streamed,) = (json.loads(each.removeprefix("data: "))["choices"][0] for each in REPLY.events(piece, offset=10))
    assert whole["logprobs"]["text_offset"] == list(range(0, 2 * count, 2))
    assert streamed["logprobs"]["text_offset"] == list(range(10, 10 + 2 * count, 2))
