"""DPO: it learns a rule in seconds, its gradient is that of a plain loop, and nothing but the preference counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlcore.config import DpoConfig, LoraConfig
from rlcore.errors import DataError, NonFiniteError
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.text.packing import TokenSequence
from rlcore.training.dpo import DpoLearner, held_out_metrics, pair_margins, run_dpo_steps, whole_logprobs
from rlcore.training.preferences import TokenPair, different_sequences
from tests import strategies
from tests.learners import UNCLIPPED, assert_same, weights_of
from tests.reference.losses import one_at_a_time
from tests.rlcore.training.test_reward_model import GOOD, pair, ranked_set, rule_pairs
from tests.small_memory import room_for

END = 2


def config(**settings: Any) -> DpoConfig:
    """One epoch with a brisk learning rate."""
    return DpoConfig(**({"num_epochs": 1, "batch_size": 16, "learning_rate": 3e-3, "beta": 0.5} | settings))


def train(
    model: Any, pairs: list[TokenPair], held_out: list[TokenPair] | None = None, **settings: Any
) -> tuple[list[Mapping[str, float]], torch.Tensor]:
    """The reports of each step, and the held-out margins at the end."""
    reports: list[Mapping[str, float]] = []
    held_out = pairs[:2] if held_out is None else held_out

    def report(_: int, metrics: Mapping[str, float]) -> None:
        reports.append(metrics)

    learner = DpoLearner(model, config(**settings))
    return reports, run_dpo_steps(learner, pairs, held_out, config(**settings), seed=0, report=report)


def answers(count: int, seed: int) -> list[TokenPair]:
    """To any prompt the good token is preferred to another one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(6, strategies.VOCABULARY, (count, 3), generator=generator).tolist()
    return [pair((1, first, second), (GOOD, END), (other, END)) for first, second, other in drawn]


def test_a_trivial_rule_is_learned_and_holds_on_unseen_pairs() -> None:
    reports, margins = train(strategies.tiny_llama(), answers(320, seed=0), answers(100, seed=1), eval_every=10)
    assert len(reports) == 20
    assert [step for step, report in enumerate(reports, 1) if "dpo/eval_accuracy" in report] == [10, 20]
    assert float((margins > 0).float().mean()) == pytest.approx(reports[-1]["dpo/eval_accuracy"])
    assert reports[-1]["dpo/eval_accuracy"] > 0.9
    assert reports[-1]["dpo/loss"] < 0.5 * reports[0]["dpo/loss"]
    assert reports[-1]["dpo/margin"] == pytest.approx(reports[-1]["dpo/chosen"] - reports[-1]["dpo/rejected"])


def test_before_the_first_step_no_side_is_preferred() -> None:
    reports, _ = train(strategies.tiny_llama(), rule_pairs(16, seed=0))
    assert reports[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert reports[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-5)


def gradient_of_step(pairs: list[TokenPair], **settings: Any) -> torch.Tensor:
    """The gradient of a second step over all pairs, away from the reference; float64."""
    gradients: list[torch.Tensor] = []

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))

    handle = register_optimizer_step_pre_hook(remember)
    model = strategies.tiny_llama(dtype=torch.float64)
    train(model, pairs, num_epochs=2, batch_size=len(pairs), optim=UNCLIPPED, **settings)
    handle.remove()
    return gradients[1]


def reference_gradient(pairs: list[TokenPair], weights: list[float], *, smoothing: float = 0.0) -> torch.Tensor:
    """The same from one forward pass per sequence and eq. 7 as a plain loop; Adam's first step is taken by hand."""
    start, model = (strategies.tiny_llama(dtype=torch.float64) for _ in range(2))
    parameters = list(model.parameters())
    ordered = [p for matrices in (True, False) for p in parameters if (p.ndim >= 2) == matrices]
    gradient: list[torch.Tensor] = []
    for step in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for item, weight in zip(pairs, weights, strict=True):
            gains = [
                one_at_a_time(model, side).sum() - one_at_a_time(start, side).sum().detach() for side in item.sides
            ]
            lead = 0.5 * (gains[0] - gains[1])
            p = item.probability * (1 - smoothing) + (1 - item.probability) * smoothing
            first, second = (torch.log1p(torch.exp(item.margin - sign * lead)) for sign in (1, -1))
            total = total + weight * (p * first + (1 - p) * second)
        gradient = list(torch.autograd.grad(total, ordered))
        if step == 0:
            with torch.no_grad():
                for parameter, part in zip(ordered, gradient, strict=True):
                    parameter -= 3e-3 * part / (part.abs() + 1e-8)  # corrected moments are g and g²
    return torch.cat([part.flatten() for part in gradient])


@pytest.mark.parametrize("budget", [1, 15, 10_000])
def test_the_gradient_is_that_of_one_sequence_after_another_whatever_the_micro_batches(budget: int) -> None:
    # Three sets: 1/3 each; the ranked one's third is spread over three pairs, 1/9 each. One pair has p = 0.8, m = 0.5.
    expected = reference_gradient(ranked_set(), [1 / 9] * 3 + [1 / 3] * 2, smoothing=0.1)
    found = gradient_of_step(ranked_set(), label_smoothing=0.1, tokens_per_microbatch=budget)
    assert_same(found, expected, 1e-5)


def test_a_completion_that_both_sides_begin_with_is_pulled_by_what_differs_alone() -> None:
    pairs = [pair((1, 2), (7, 8, 9), (7, 8, 10)), pair((3,), (7,), (8,))]
    assert_same(gradient_of_step(pairs), reference_gradient(pairs, [0.5, 0.5]), 1e-5)


def test_the_gain_of_a_completion_is_counted_over_all_of_its_tokens() -> None:
    sequence = TokenSequence(prompt_ids=(1, 2), completion_ids=(5, 6, 7, 8))
    model = strategies.tiny_llama()
    found = whole_logprobs(model, [sequence], tokens_per_microbatch=64)
    assert found[sequence] == pytest.approx(float(one_at_a_time(model, sequence).sum().detach()), rel=1e-5)


def test_margins_are_the_implicit_rewards_of_a_policy_above_its_reference() -> None:
    pairs = rule_pairs(3, seed=5)
    start, model, other = (strategies.tiny_llama(seed=seed) for seed in (1, 1, 2))
    learner = DpoLearner(model, config(beta=0.3))
    learner.begin(different_sequences(pairs), num_steps=1)
    model.load_state_dict(other.state_dict())
    found = pair_margins(learner, pairs)
    for one, margin in zip(pairs, found.tolist(), strict=True):
        gains = [float((one_at_a_time(model, s) - one_at_a_time(start, s)).sum().detach()) for s in one.sides]
        assert margin == pytest.approx(0.3 * (gains[0] - gains[1]), rel=1e-4)


def test_held_out_figures_count_each_pair_once_and_a_tie_by_half() -> None:
    # -ln σ(1) = 0.313262, -ln σ(0) = 0.693147, -ln σ(-1) = 1.313262: mean 0.773224; right: 1, ½, 0
    found = held_out_metrics(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    expected = {"dpo/eval_loss": 0.773224, "dpo/eval_accuracy": 0.5, "dpo/eval_margin": 0.0}
    assert found == pytest.approx(expected, abs=1e-6)


def adapted(seed: int = 0) -> AdaptedModel:
    return add_lora(strategies.tiny_llama(), LoraConfig(rank=4), "policy", seed=seed)


def test_an_adapter_learns_and_its_reference_is_the_model_without_it() -> None:
    model = adapted()
    before = {name: value.clone() for name, value in model.base.state_dict().items() if "lora_" not in name}
    pairs = rule_pairs(64, seed=0)
    bare = whole_logprobs(AdaptedModel(model.base, ""), different_sequences(pairs), tokens_per_microbatch=128)
    assert bare == whole_logprobs(model, different_sequences(pairs), tokens_per_microbatch=128)
    learner, reports = DpoLearner(model, config(learning_rate=2e-2)), list[Mapping[str, float]]()
    margins = run_dpo_steps(
        learner, pairs, pairs, config(learning_rate=2e-2), seed=0, report=lambda _, found: reports.append(found)
    )
    assert reports[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert float(margins.mean()) > 0.5
    torch.testing.assert_close(margins, pair_margins(learner, pairs), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(model.base.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_learns_in_half_precision_on_weights_of_float32(dtype: torch.dtype) -> None:
    model = set_compute_dtype(strategies.tiny_llama(initializer_range=0.1), dtype)
    reports, margins = train(model, rule_pairs(64, seed=0), rule_pairs(20, seed=1))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert reports[-1]["dpo/loss"] < reports[0]["dpo/loss"]
    assert float(margins.mean()) > 0.0


def test_what_does_not_fit_into_memory_is_done_again_in_smaller_parts_with_the_same_loss() -> None:
    pairs = rule_pairs(16, seed=0)
    whole, _ = train(strategies.tiny_llama(), pairs, tokens_per_microbatch=400)
    model = strategies.tiny_llama()
    with room_for(model, 80) as tried:
        parts, _ = train(model, pairs, tokens_per_microbatch=400)
    assert max(tried) > 80 >= tried[-1]
    assert parts[0]["dpo/loss"] == pytest.approx(whole[0]["dpo/loss"], rel=1e-5)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="no preference pairs"):
        train(strategies.tiny_llama(), [])


def test_a_non_finite_loss_stops_before_the_step() -> None:
    model = strategies.tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    before = weights_of(model)[:100].clone()
    with pytest.raises(NonFiniteError, match="the DPO loss is nan"):
        train(model, rule_pairs(4, seed=0))
    assert torch.equal(weights_of(model)[:100], before)


def test_the_same_seed_gives_the_same_model_bit_for_bit_however_often_it_is_evaluated() -> None:
    results = []
    for every in (0, 1):
        model = strategies.tiny_llama()
        train(model, rule_pairs(40, seed=0), num_epochs=2, eval_every=every)
        results.append(weights_of(model))
    assert torch.equal(*results)
