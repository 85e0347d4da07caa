"""Supervised fine-tuning: a rule is learned, and all tokens of the completions count alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.config import SftConfig
from rlcore.errors import DataError, NonFiniteError
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.training.sft import SftLearner, mean_loss, minibatches, run_sft_steps
from tests import strategies
from tests.learners import UNCLIPPED, assert_same, gradient_of_loops, recorded_gradients, weights_of
from tests.reference.losses import one_at_a_time

END = 2


def echo_sequences(count: int, seed: int) -> list[TokenSequence]:
    """Prompts of one random token, answered by that token and the end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, strategies.VOCABULARY, (count,), generator=generator).tolist()
    return [TokenSequence(prompt_ids=(1, token), completion_ids=(token, END)) for token in tokens]


def whole(sequences: Sequence[TokenSequence]) -> list[Demonstration]:
    """Demonstrations of one turn: every completion token counts."""
    return [Demonstration(sequence=one, loss_mask=(True,) * len(one.completion_ids)) for one in sequences]


def config(**settings: Any) -> SftConfig:
    return SftConfig(**({"num_steps": 60, "batch_size": 16, "learning_rate": 1e-2} | settings))


def train(model: LlamaForCausalLM, shown: list[Demonstration], **settings: Any) -> list[Mapping[str, float]]:
    reports: list[Mapping[str, float]] = []
    wanted = config(**settings)
    run_sft_steps(
        SftLearner(model, wanted),
        shown,
        whole(echo_sequences(20, seed=99)),
        wanted,
        seed=0,
        report=lambda _, metrics: reports.append(metrics),
    )
    return reports


def test_sft_learns_a_rule() -> None:
    model = strategies.tiny_llama()
    reports = train(model, whole(echo_sequences(200, seed=0)), eval_every=30)
    assert reports[0]["sft/loss"] > 2.0
    assert reports[-1]["sft/loss"] < 0.1
    assert reports[-1]["sft/eval_loss"] < 0.2
    assert [step for step, report in enumerate(reports, start=1) if "sft/eval_loss" in report] == [30, 60]
    logits = model(torch.tensor([[1, 17, 17]])).logits[0]
    assert logits[1:].argmax(-1).tolist() == [17, END]


def gradient_of_step(shown: list[Demonstration], **settings: Any) -> torch.Tensor:
    with recorded_gradients() as gradients:
        model = strategies.tiny_llama(dtype=torch.float64)
        train(model, shown, num_steps=1, batch_size=len(shown), optim=UNCLIPPED, **settings)
    return gradients[0]


@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_sft_gradient_equals_plain_loops(budget: int) -> None:
    sequences = strategies.random_sequences(1)
    masks = [tuple(place % 3 != 1 for place in range(len(one.completion_ids))) for one in sequences]
    shown = [Demonstration(sequence=one, loss_mask=mask) for one, mask in zip(sequences, masks, strict=True)]
    model = strategies.tiny_llama(dtype=torch.float64)
    logprobs = torch.cat(
        [one_at_a_time(model, one)[torch.tensor(mask)] for one, mask in zip(sequences, masks, strict=True)]
    )
    assert len(logprobs) == sum(map(sum, masks)) < sum(map(len, masks))
    expected = gradient_of_loops((-logprobs.mean(), model))
    assert_same(gradient_of_step(shown, tokens_per_microbatch=budget), expected, 1e-9)
    assert mean_loss(model, shown, budget) == pytest.approx(-float(logprobs.mean().detach()), rel=1e-6)


def test_epoch_shows_every_demonstration_once() -> None:
    sequences = whole(strategies.random_sequences(0, num_prompts=4, group_size=3))
    shown = [id(s) for batch in minibatches(sequences, config(num_steps=6, batch_size=4), seed=0) for s in batch]
    first, second = shown[:12], shown[12:]
    assert sorted(first) == sorted(second) == sorted(map(id, sequences))
    assert first != second


def test_minibatch_may_be_larger_than_dataset() -> None:
    sequences = whole(strategies.random_sequences(0, num_prompts=1, group_size=3))
    (batch,) = minibatches(sequences, config(num_steps=1, batch_size=7), seed=0)
    assert len(batch) == 7


def test_sft_without_demonstrations_is_refused() -> None:
    with pytest.raises(DataError, match="no demonstration"):
        train(strategies.tiny_llama(), [])


def test_non_finite_loss_stops_before_step() -> None:
    model = strategies.tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    before = weights_of(model)[:100].clone()
    with pytest.raises(NonFiniteError, match="SFT loss of step 1 is nan"):
        train(model, whole(echo_sequences(8, seed=0)))
    assert torch.equal(weights_of(model)[:100], before)


def test_evaluation_changes_no_bit() -> None:
    results = []
    for every in (0, 1):
        model = strategies.tiny_llama()
        train(model, whole(echo_sequences(40, seed=0)), num_steps=5, eval_every=every)
        results.append(weights_of(model))
    assert torch.equal(*results)
