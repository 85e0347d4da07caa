"""A prompt's keys and values: once for all of its rows, and gone with the last of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from rlcore.sampling import decoding
from rlcore.sampling.decoding import decode, sample_tokens
from rlcore.sampling.kv_cache import cache_argument, find_gaps, group_rows
from tests.rlcore.sampling.test_decoding import NO_EOS, llama, ready, uniforms


class Before(PreTrainedModel):  # type: ignore[misc]
    def forward(self, past_key_values: Cache | None = None) -> None: ...


class After(PreTrainedModel):  # type: ignore[misc]
    def forward(self, cache: Cache | None = None) -> None: ...


@pytest.mark.parametrize(("kind", "name"), [(Before, "past_key_values"), (After, "cache")])
def test_a_cache_has_the_name_that_the_model_of_each_version_gives_it(kind: type[PreTrainedModel], name: str) -> None:
    cache = Cache(layers=[])
    assert cache_argument(kind(PreTrainedConfig()), cache) == {name: cache}


def test_rows_of_one_prompt_stand_side_by_side() -> None:
    # Prompt 0 has the rows 1 and 3, prompt 1 the rows 0, 2 and 4: three slots each, and one of prompt 0 is left over.
    sharing = group_rows(Cache(layers=[]), torch.tensor([1, 0, 1, 0, 1]), torch.ones(2, 4, dtype=torch.bool))
    assert sharing.slots.tolist() == [1, 3, 0, 0, 2, 4]
    assert sharing.indices.tolist() == [3, 0, 4, 1, 5]
    assert sharing.slots[sharing.indices].tolist() == [0, 1, 2, 3, 4]


def test_the_last_rows_take_the_places_of_ended_ones() -> None:
    live = torch.tensor([True, False, True, False, True, True])
    rows = torch.arange(60.0).view(6, 10)
    assert find_gaps(live, 4).close(rows)[:, 0].tolist() == [0.0, 40.0, 20.0, 50.0]


def test_prompts_are_not_copied_for_their_rows_and_leave_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_COMPACT_AT", 1.0)
    seen: list[tuple[int, int]] = []
    model = ready(llama)
    advance = decoding._Batch.advance

    def noting(batch: decoding._Batch, tokens: torch.Tensor) -> torch.Tensor:
        logits = advance(batch, tokens)
        seen.append((len(batch.cache.layers[0].prompt_keys), len(batch.cache.layers[0].keys)))
        return logits

    monkeypatch.setattr(decoding._Batch, "advance", noting)
    prompts = [(5, 6, 7)] * 3 + [(8, 9)] * 3
    eos_ids = torch.arange(0, 40, 5)
    with torch.inference_mode():
        decoded = decode(
            model, prompts, uniforms(6, 40), choose=partial(sample_tokens, temperature=0.9), eos_ids=eos_ids
        )
    assert seen[0][0] == 2  # prompts, for at most 6 rows
    assert seen[0][1] > 2
    assert seen[-1][0] <= seen[-1][1]
    ends = decoded.lengths.view(2, 3).amax(1)
    assert seen[-1][0] == (2 if int(ends[0]) == int(ends[1]) else 1)


@pytest.mark.parametrize("groups", [[3, 1, 2], [1, 1, 1], [6]], ids=str)
def test_how_rows_are_spread_over_prompts_changes_nothing(groups: list[int]) -> None:
    prompts = [(5 + number, *range(20, 21 + 2 * number)) for number, size in enumerate(groups) for _ in range(size)]
    model, draws = ready(llama), uniforms(len(prompts), 20)
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        together = decode(model, prompts, draws, choose=choose, eos_ids=NO_EOS)
        for row, prompt in enumerate(prompts):
            alone = decode(model, [prompt], draws[row : row + 1], choose=choose, eos_ids=NO_EOS)
            assert torch.equal(together.tokens[row], alone.tokens[0])
            torch.testing.assert_close(together.logprobs[row], alone.logprobs[0], atol=2e-5, rtol=0)


def test_it_decodes_in_bfloat16_too() -> None:
    model = ready(llama)
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        exact = decode(model, [(5, 6, 7)] * 2 + [(8, 9)], uniforms(3, 5), choose=choose, eos_ids=NO_EOS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = decode(model, [(5, 6, 7)] * 2 + [(8, 9)], uniforms(3, 5), choose=choose, eos_ids=NO_EOS)
    torch.testing.assert_close(half.logprobs[:, 0], exact.logprobs[:, 0], atol=0.1, rtol=0)
    assert half.logprobs.dtype == torch.float32
