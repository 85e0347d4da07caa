"""Forced lengths on both sides of the comparison with TRL, and its table."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from benchmarks.peers import grpo, work
from benchmarks.peers.forced import ForcedLengths, decode_forced
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from tests import strategies

PROMPT = (5, 6, 7)
LENGTHS = torch.tensor([4, 1, 6, 3])


def test_our_engine_ends_each_completion_at_its_place_and_nowhere_else() -> None:
    engine = strategies.tiny_llama(0, vocab_size=8).requires_grad_(False).eval()
    engine.set_attn_implementation(GROUPED_ATTENTION)
    made = decode_forced(engine, [PROMPT] * 4, LENGTHS)
    assert made.lengths.tolist() == LENGTHS.tolist()
    assert bool(made.stopped.all())
    for row, length in zip(made.tokens.tolist(), LENGTHS.tolist(), strict=True):
        assert [token == work.EOS for token in row[:length]] == [False] * (length - 1) + [True]


def test_generate_ends_each_completion_at_the_same_places() -> None:
    model = strategies.tiny_llama(0, vocab_size=8).eval()
    processors = LogitsProcessorList([ForcedLengths(len(PROMPT), LENGTHS)])
    prompts = torch.tensor([PROMPT] * 4)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=8,
        eos_token_id=work.EOS,
        pad_token_id=0,
        logits_processor=processors,
    )
    ends = (output[:, len(PROMPT) :] == work.EOS).int().argmax(-1) + 1
    assert ends.tolist() == LENGTHS.tolist()


def test_the_table_has_medians_of_the_rounds_and_multiples_of_the_floor() -> None:
    figures = {"model": "tiny", "threads": 1, "wall_seconds": 1.0, "generation_cpu_seconds": 0.5, "before_mib": 100.0}
    timings = [
        figures | {"arm": arm, "cpu_seconds": seconds, "peak_mib": 150.0}
        for arm, rounds in (("ours", (1.0, 9.0, 2.0)), ("trl-tuned", (6.0, 8.0, 7.0)))
        for seconds in rounds
    ]
    gflops = work.floor_flops("tiny") / 1e9  # the floor is one second
    peaks = [{"model": "tiny", "threads": 1, "gflops": gflops}]
    lines = grpo.tables(timings, peaks).splitlines()
    assert "| ours | 3 | 1.0 | 2.0 (1.0 to 9.0) | 0.5 | 2.0 × | 1/3.50 | 150 (50) |" in lines
    assert "| trl-tuned | 3 | 1.0 | 7.0 (6.0 to 8.0) | 0.5 | 7.0 × | 1/1.00 | 150 (50) |" in lines
