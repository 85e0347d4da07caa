"""What the comparisons with peers rest on: forced lengths on both sides, medians, the difference of loss curves."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LogitsProcessorList

from benchmarks import plots, rollout
from benchmarks.peers import arena, supervised, work
from benchmarks.peers.forced import ForcedLengths, decode_forced
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from tests import strategies

PROMPT = (5, 6, 7)
LENGTHS = torch.tensor([4, 1, 6, 3])


def run(arm: str, **figures: object) -> arena.Timing:
    return {"arm": arm, "wall_seconds": 1.0, "cpu_seconds": 1.0, "before_mib": 100.0, "peak_mib": 150.0} | figures


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


def test_the_table_of_losses_states_the_largest_difference_to_the_first_arm() -> None:
    timings = [run("ours", losses=[3.0, 2.0, 1.0]), run("trl", losses=[3.0, 2.25, 0.9], cpu_seconds=2.5)]
    text = supervised.render(timings)
    assert "| trl | 3.000000 | 2.250000 | 0.900000 | 2.5e-01 |" in text
    assert "| trl | 1 | 1.0 | 2.5 (2.5 to 2.5) | 2.50x | 50 |" in text


def test_medians_are_over_the_rounds_of_an_arm() -> None:
    timings = [run("ours", cpu_seconds=seconds) for seconds in (1.0, 9.0, 2.0)]
    assert arena.median(timings, "cpu_seconds") == 2.0
    assert arena.spread(timings, "cpu_seconds") == "2.0 (1.0 to 9.0)"
    assert list(arena.by_arm([*timings, run("trl")])) == ["ours", "trl"]


def test_rollout_tasks_are_the_same_for_every_engine_and_have_groups_of_one_prompt() -> None:
    first, second = rollout.make_task(16, "tailed"), rollout.make_task(16, "tailed")
    assert first.prompts == second.prompts
    assert first.lengths.equal(second.lengths)
    assert [len(list(group)) for _, group in itertools.groupby(first.prompts)] == [8, 8]
    assert rollout.make_task(16, "short").lengths.tolist() == [16] * 16


def test_rates_are_tokens_by_processor_seconds_and_an_engine_that_was_not_asked_has_none() -> None:
    # 320 tokens in 2 and 4 seconds: 160 and 80 a second, median 120
    figures = {"size": 16, "kind": "short", "tokens": 320, "wall_seconds": 9.0, "peak_mib": 0.0}
    runs = [rollout.Run(engine="native", cpu_seconds=seconds, **figures) for seconds in (2.0, 4.0)]
    runs.append(rollout.Run(engine="vLLM", cpu_seconds=1.0, **figures | {"size": 64}))
    text = rollout.render(runs)
    assert "| short | 16 | 320 | 120 (80 to 160) | – |" in text


@pytest.mark.parametrize("kind", ["arms", "engines"])
def test_a_report_can_be_plotted(kind: str) -> None:
    engines = [{"engine": "native", "kind": "short", "size": 16, "tokens": 8, "cpu_seconds": 1.0}]
    figure = plots.plot_arms([run("ours"), run("trl")]) if kind == "arms" else plots.plot_engines(engines)
    assert figure.axes
