"""Preferences: DPO and reward models learn a rule, count prompts and not pairs, and equal plain loops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import DpoConfig, LoraConfig, PreferenceLossConfig, RewardModelConfig
from rlcore.errors import DataError, NonFiniteError
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.training.dpo import DpoLearner, held_out_metrics, pair_margins, run_dpo_steps, whole_logprobs
from rlcore.training.preferences import TokenPair, different_sequences, microbatches, preference_sets
from tests import strategies
from tests.learners import (
    UNCLIPPED,
    assert_same,
    gradient_of_loops,
    recorded_gradients,
    train_reward_model,
    weights_of,
)
from tests.reference.losses import one_at_a_time
from tests.small_memory import room_for


def ranking(prompt: int, lengths: list[int], *, set_id: str = "s", weight: float = 1.0) -> list[TokenPair]:
    """All pairs of a ranking without ties; completion k holds the token k, ``lengths[k]`` times."""
    texts = [(number,) * length for number, length in enumerate(lengths)]
    return [
        TokenPair(set_id=set_id, prompt_ids=(prompt,), chosen_ids=better, rejected_ids=worse, weight=weight)
        for better, worse in combinations(texts, 2)
    ]


def test_ranking_of_four_by_hand() -> None:
    # 4 * 3 / 2 = 6 pairs, which share the weight 0.5 of the set: 1/12 each.
    (one,) = preference_sets(ranking(9, [1, 2, 3, 4], weight=0.5))
    assert [each.completion_ids for each in one.sequences] == [(0,), (1, 1), (2, 2, 2), (3, 3, 3, 3)]
    assert [(each.chosen_ids[0], each.rejected_ids[0]) for each in one.pairs] == list(combinations(range(4), 2))
    assert [each.weight for each in one.pairs] == [pytest.approx(1 / 12)] * 6
    assert one.num_tokens == 1 + 10


def test_incomplete_set_counts_once() -> None:
    pairs = ranking(9, [1, 1, 1], set_id="a")[:2] + ranking(8, [1, 1], set_id="b")
    assert [sum(each.weight for each in one.pairs) for one in preference_sets(pairs)] == [1.0, 1.0]


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=1, max_size=5), st.integers(1, 60))
def test_micro_batches_keep_pairs_and_budget(shapes: list[list[int]], budget: int) -> None:
    sets = preference_sets([p for n, shape in enumerate(shapes) for p in ranking(n, shape, set_id=str(n))])
    cut = microbatches(sets, budget)
    kept, given = (sorted(str(pair) for one in each for pair in one.pairs) for each in (chain(*cut), sets))
    assert kept == given
    for micro in cut:
        fits = micro[0].num_tokens * len(micro) <= budget
        assert fits or (len(micro) == 1 and len(micro[0].pairs) == 1)  # one pair is the least there is


GOOD = 5  # the rule: the completion that holds this token is preferred


def pair(
    prompt: tuple[int, ...],
    chosen: tuple[int, ...],
    rejected: tuple[int, ...],
    *,
    set_id: str = "",
    **labels: float,
) -> TokenPair:
    name = set_id or f"{prompt}{chosen}{rejected}"
    return TokenPair(set_id=name, prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected, **labels)


def rule_pairs(count: int, seed: int) -> list[TokenPair]:
    """Random completions of four to seven tokens; the chosen one ends with the good token, the other lacks it."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple((torch.randint(6, strategies.VOCABULARY, (length,), generator=generator)).tolist())

    lengths = torch.randint(3, 7, (count, 2), generator=generator).tolist()
    return [pair((1, *tokens(2)), (*tokens(a), GOOD), tokens(b + 1)) for a, b in lengths]


def reward_config(**settings: Any) -> RewardModelConfig:
    brisk = {"num_epochs": 1, "batch_size": 16, "learning_rate": 3e-3, "head_learning_rate": 3e-2}
    return RewardModelConfig(**(brisk | settings))


def reward_model_of(dtype: torch.dtype = torch.float32) -> ScalarHeadModel:
    return ScalarHeadModel.with_random_head(strategies.tiny_llama(dtype=dtype), torch.Generator().manual_seed(0)).to(
        dtype
    )


def train_rewards(reward_model: ScalarHeadModel, pairs: list[TokenPair], **settings: Any) -> list[Mapping[str, float]]:
    reports: list[Mapping[str, float]] = []
    train_reward_model(
        reward_model, pairs, reward_config(**settings), seed=0, report=lambda _, metrics: reports.append(metrics)
    )
    return reports


def accuracy(reward_model: ScalarHeadModel, pairs: list[TokenPair]) -> float:
    scores = score_rewards(reward_model, [side for each in pairs for side in each.sides], tokens_per_microbatch=512)
    return float((scores[0::2] > scores[1::2]).float().mean())


def test_reward_model_learns_a_rule() -> None:
    reward_model, held_out = reward_model_of(), rule_pairs(100, seed=1)
    before = accuracy(reward_model, held_out)
    reports = train_rewards(reward_model, rule_pairs(320, seed=0))
    assert before < 0.8
    assert accuracy(reward_model, held_out) > 0.9
    assert len(reports) == 20
    first, last = (sum(r["rm/loss"] for r in part) / 3 for part in (reports[:3], reports[-3:]))
    assert last < 0.5 * first
    assert reports[-1]["rm/accuracy"] > 0.9


def reward_gradient(pairs: list[TokenPair], **settings: Any) -> torch.Tensor:
    """The gradient, of all weights, of one step over all pairs; float64."""
    with recorded_gradients() as gradients:
        train_rewards(reward_model_of(torch.float64), pairs, batch_size=len(pairs), optim=UNCLIPPED, **settings)
    return gradients[0]


def reward_gradient_of_loops(
    pairs: list[TokenPair], weights: list[float], *, margin: float, smoothing: float
) -> torch.Tensor:
    """The same from one forward pass per sequence and the loss as a plain loop."""
    reward_model = reward_model_of(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for item, weight in zip(pairs, weights, strict=True):
        chosen, rejected = (
            reward_model.head(
                reward_model.backbone.base_model(torch.tensor([item.prompt_ids + side])).last_hidden_state[0, -1]
            )
            for side in (item.chosen_ids, item.rejected_ids)
        )
        p = item.probability * (1 - smoothing) + (1 - item.probability) * smoothing
        lead, lag = ((d - item.margin - margin).squeeze() for d in (chosen - rejected, rejected - chosen))
        total = total + weight * (p * torch.log1p(torch.exp(-lead)) + (1 - p) * torch.log1p(torch.exp(-lag)))
    return gradient_of_loops((total, reward_model.backbone.base_model), (total, reward_model.head))


def ranked_set() -> list[TokenPair]:
    """Three ranked completions of one prompt, and two prompts with a pair of their own, of which one is in doubt."""
    best, middle, worst = (6, 7, 8), (9, 10), (11, 12, 13, 14)
    ranked = [pair((1, 2), *sides, set_id="ranked") for sides in ((best, middle), (best, worst), (middle, worst))]
    return [*ranked, pair((3,), (4, 5), (6,)), pair((4, 4, 4), (7,), (8, 9), margin=0.5, probability=0.8)]


@pytest.mark.parametrize("budget", [1, 15, 10_000])
def test_reward_gradient_equals_plain_loops(budget: int) -> None:
    # Three sets: 1/3 each; the ranked one's third is spread over three pairs, 1/9 each.
    expected = reward_gradient_of_loops(ranked_set(), [1 / 9] * 3 + [1 / 3] * 2, margin=0.3, smoothing=0.1)
    loss = PreferenceLossConfig(margin=0.3, label_smoothing=0.1)
    assert_same(reward_gradient(ranked_set(), loss=loss, tokens_per_microbatch=budget), expected, 1e-6)


def test_ranked_completion_is_computed_once() -> None:
    reward_model, sizes = reward_model_of(), []
    reward_model.backbone.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    train_rewards(reward_model, ranked_set()[:3])
    assert sizes == [2 + 3 + 2 + 4]  # the prompt and each of the three completions; as pairs it would be 3 * 2 + 2 * 9


def test_non_finite_reward_loss_stops_before_step() -> None:
    reward_model = reward_model_of()
    with torch.no_grad():
        reward_model.head.weight[0, 0] = math.nan
    before = weights_of(reward_model.backbone)
    with pytest.raises(NonFiniteError, match="reward model's loss is nan"):
        train_rewards(reward_model, rule_pairs(4, seed=0))
    assert torch.equal(weights_of(reward_model.backbone), before)


END = 2


def dpo_config(**settings: Any) -> DpoConfig:
    return DpoConfig(**({"num_epochs": 1, "batch_size": 16, "learning_rate": 3e-3, "beta": 0.5} | settings))


def train_dpo(
    model: Any, pairs: list[TokenPair], held_out: list[TokenPair] | None = None, **settings: Any
) -> tuple[list[Mapping[str, float]], torch.Tensor]:
    reports: list[Mapping[str, float]] = []
    held_out = pairs[:2] if held_out is None else held_out

    def report(_: int, metrics: Mapping[str, float]) -> None:
        reports.append(metrics)

    learner = DpoLearner(model, dpo_config(**settings))
    return reports, run_dpo_steps(learner, pairs, held_out, dpo_config(**settings), seed=0, report=report)


def answers(count: int, seed: int) -> list[TokenPair]:
    """To any prompt the good token is preferred to another one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(6, strategies.VOCABULARY, (count, 3), generator=generator).tolist()
    return [pair((1, first, second), (GOOD, END), (other, END)) for first, second, other in drawn]


def test_dpo_learns_a_rule() -> None:
    reports, margins = train_dpo(strategies.tiny_llama(), answers(320, seed=0), answers(100, seed=1), eval_every=10)
    assert len(reports) == 20
    assert [step for step, report in enumerate(reports, 1) if "dpo/eval_accuracy" in report] == [10, 20]
    assert float((margins > 0).float().mean()) == pytest.approx(reports[-1]["dpo/eval_accuracy"])
    assert reports[-1]["dpo/eval_accuracy"] > 0.9
    assert reports[-1]["dpo/loss"] < 0.5 * reports[0]["dpo/loss"]
    assert reports[-1]["dpo/margin"] == pytest.approx(reports[-1]["dpo/chosen"] - reports[-1]["dpo/rejected"])


def test_dpo_starts_without_preference() -> None:
    reports, _ = train_dpo(strategies.tiny_llama(), rule_pairs(16, seed=0))
    assert reports[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert reports[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-5)


def dpo_gradient(pairs: list[TokenPair], **settings: Any) -> torch.Tensor:
    """The gradient of a second step over all pairs, away from the reference; float64."""
    with recorded_gradients() as gradients:
        model = strategies.tiny_llama(dtype=torch.float64)
        train_dpo(model, pairs, num_epochs=2, batch_size=len(pairs), optim=UNCLIPPED, **settings)
    return gradients[1]


def dpo_gradient_of_loops(pairs: list[TokenPair], weights: list[float], *, smoothing: float = 0.0) -> torch.Tensor:
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
def test_dpo_gradient_equals_plain_loops(budget: int) -> None:
    # Three sets: 1/3 each; the ranked one's third is spread over three pairs, 1/9 each. One pair has p = 0.8, m = 0.5.
    expected = dpo_gradient_of_loops(ranked_set(), [1 / 9] * 3 + [1 / 3] * 2, smoothing=0.1)
    found = dpo_gradient(ranked_set(), label_smoothing=0.1, tokens_per_microbatch=budget)
    assert_same(found, expected, 1e-5)


def test_dpo_gradient_of_common_prefix() -> None:
    pairs = [pair((1, 2), (7, 8, 9), (7, 8, 10)), pair((3,), (7,), (8,))]
    assert_same(dpo_gradient(pairs), dpo_gradient_of_loops(pairs, [0.5, 0.5]), 1e-5)


def test_margins_are_implicit_rewards() -> None:
    pairs = rule_pairs(3, seed=5)
    start, model, other = (strategies.tiny_llama(seed=seed) for seed in (1, 1, 2))
    learner = DpoLearner(model, dpo_config(beta=0.3))
    learner.begin(different_sequences(pairs), num_steps=1)
    model.load_state_dict(other.state_dict())
    found = pair_margins(learner, pairs)
    for one, margin in zip(pairs, found.tolist(), strict=True):
        gains = [float((one_at_a_time(model, s) - one_at_a_time(start, s)).sum().detach()) for s in one.sides]
        assert margin == pytest.approx(0.3 * (gains[0] - gains[1]), rel=1e-4)


def test_held_out_metrics_by_hand() -> None:
    # -ln σ(1) = 0.313262, -ln σ(0) = 0.693147, -ln σ(-1) = 1.313262: mean 0.773224; right: 1, ½, 0
    found = held_out_metrics(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    expected = {"dpo/eval_loss": 0.773224, "dpo/eval_accuracy": 0.5, "dpo/eval_margin": 0.0}
    assert found == pytest.approx(expected, abs=1e-6)


def adapted_policy(seed: int = 0) -> AdaptedModel:
    return add_lora(strategies.tiny_llama(), LoraConfig(rank=4), "policy", seed=seed)


def test_dpo_adapter_learns_against_its_base() -> None:
    model = adapted_policy()
    before = {name: value.clone() for name, value in model.base.state_dict().items() if "lora_" not in name}
    pairs = rule_pairs(64, seed=0)
    bare = whole_logprobs(AdaptedModel(model.base, ""), different_sequences(pairs), tokens_per_microbatch=128)
    assert bare == whole_logprobs(model, different_sequences(pairs), tokens_per_microbatch=128)
    learner, reports = DpoLearner(model, dpo_config(learning_rate=2e-2)), list[Mapping[str, float]]()
    margins = run_dpo_steps(
        learner, pairs, pairs, dpo_config(learning_rate=2e-2), seed=0, report=lambda _, found: reports.append(found)
    )
    assert reports[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert float(margins.mean()) > 0.5
    torch.testing.assert_close(margins, pair_margins(learner, pairs), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(model.base.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dpo_learns_in_half_precision(dtype: torch.dtype) -> None:
    model = set_compute_dtype(strategies.tiny_llama(initializer_range=0.1), dtype)
    reports, margins = train_dpo(model, rule_pairs(64, seed=0), rule_pairs(20, seed=1))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert reports[-1]["dpo/loss"] < reports[0]["dpo/loss"]
    assert float(margins.mean()) > 0.0


def test_dpo_retries_smaller_out_of_memory() -> None:
    pairs = rule_pairs(16, seed=0)
    whole, _ = train_dpo(strategies.tiny_llama(), pairs, tokens_per_microbatch=400)
    model = strategies.tiny_llama()
    with room_for(model, 80) as tried:
        parts, _ = train_dpo(model, pairs, tokens_per_microbatch=400)
    assert max(tried) > 80 >= tried[-1]
    assert parts[0]["dpo/loss"] == pytest.approx(whole[0]["dpo/loss"], rel=1e-5)


def test_dpo_without_pairs_is_refused() -> None:
    with pytest.raises(DataError, match="no preference pairs"):
        train_dpo(strategies.tiny_llama(), [])


def test_non_finite_dpo_loss_stops_before_step() -> None:
    model = strategies.tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    before = weights_of(model)[:100].clone()
    with pytest.raises(NonFiniteError, match="the DPO loss is nan"):
        train_dpo(model, rule_pairs(4, seed=0))
    assert torch.equal(weights_of(model)[:100], before)


def test_evaluation_changes_no_bit() -> None:
    results = []
    for every in (0, 1):
        model = strategies.tiny_llama()
        train_dpo(model, rule_pairs(40, seed=0), num_epochs=2, eval_every=every)
        results.append(weights_of(model))
    assert torch.equal(*results)
