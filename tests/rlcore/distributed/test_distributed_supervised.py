"""Supervised fine-tuning, DPO and reward models on ranks take the steps of one process, and a lost rank ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlcore.config import (
    BackboneConfig,
    DistributedConfig,
    DpoConfig,
    LoraConfig,
    OptimConfig,
    RewardModelConfig,
    SftConfig,
)
from rlcore.distributed.build import shard_models
from rlcore.distributed.build_supervised import SupervisedPlan
from rlcore.distributed.distributed_learner import DistributedSupervised
from rlcore.distributed.rank_pool import RankPool
from rlcore.errors import LearnerLostError
from rlcore.hardware.sharded import ONE, Ranks, ShardConfig, attach_ranks, gather_full, shard
from rlcore.models.loading import load_policy
from rlcore.models.lora import add_lora
from rlcore.models.reward_ensemble import RewardScale, RewardScales, load_reward_model
from rlcore.models.runtime import Runtime
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.training.dpo import DpoLearner, dpo_policy, run_dpo_steps
from rlcore.training.optim import parameters_of
from rlcore.training.preferences import TokenPair, different_sequences, preference_sets
from rlcore.training.reward_model import RewardLearner, fit_reward_model, reward_backbone, reward_members
from rlcore.training.sft import SftLearner, run_sft_steps
from tests import strategies
from tests.ranks import Forks, on_ranks
from tests.rlcore.loop.conftest import start
from tests.waiting import LONG

__all__ = ["start"]  # a fixture
CPU = torch.device("cpu")
RUNTIME = Runtime(device=CPU, compute_dtype=torch.float32)
REWARDS = RewardModelConfig(
    num_epochs=2,
    batch_size=4,
    learning_rate=1e-2,
    head_learning_rate=1e-2,
    audit_folds=0,
    tokens_per_microbatch=16,
    optim=OptimConfig(max_grad_norm=0.5),
)
CONFIG = SftConfig(
    num_steps=3, batch_size=5, learning_rate=1e-2, tokens_per_microbatch=16, optim=OptimConfig(max_grad_norm=0.5)
)
DPO = DpoConfig(
    num_epochs=2,
    batch_size=4,
    learning_rate=1e-2,
    beta=0.5,
    label_smoothing=0.1,
    tokens_per_microbatch=16,
    eval_every=2,
    optim=OptimConfig(max_grad_norm=0.5),
)


def demonstrations(count: int, seed: int = 0) -> list[Demonstration]:
    draws = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = tuple(torch.randint(5, strategies.VOCABULARY, (3 + number % 5,), generator=draws).tolist())
        sequence = TokenSequence(prompt_ids=(1, ids[0]), completion_ids=ids[1:])
        found.append(Demonstration(sequence=sequence, loss_mask=(False, *(True,) * (len(ids) - 2))))
    return found


def taught(held: Literal["full", "replicate"]) -> Callable[[Ranks], tuple[list[Any], torch.Tensor]]:
    """Work for ranks: the reports of three steps, and the weights after them."""

    def work(ranks: Ranks) -> tuple[list[Any], torch.Tensor]:
        with strategies.double_precision():
            model = strategies.tiny_llama(dtype=torch.float64)
            if ranks.size * ranks.width > 1 and held == "full":
                shard(model, ranks, ShardConfig(), device=CPU)
            elif ranks.size > 1:
                attach_ranks(model, ranks)
            reports: list[Any] = []
            learner, train = SftLearner(model, CONFIG), demonstrations(9)
            run_sft_steps(learner, train, train[:4], CONFIG, seed=0, report=lambda _, metrics: reports.append(metrics))
            return reports, torch.cat([gather_full(p.detach()).flatten() for p in model.parameters()])

    return work


@pytest.mark.parametrize(
    ("held", "size", "width"),
    [
        ("full", 2, 1),
        pytest.param("replicate", 2, 1, marks=pytest.mark.scale),
        pytest.param("full", 4, 1, marks=pytest.mark.scale),
        pytest.param("full", 4, 2, marks=pytest.mark.scale),
    ],
)
def test_ranks_take_the_steps_of_one_process(
    held: Literal["full", "replicate"], size: int, width: int, tmp_path: Path
) -> None:
    reports, weights = taught(held)(ONE)
    for their_reports, their_weights in on_ranks(size, taught(held), tmp_path, width=width):
        assert float((their_weights - weights).norm() / weights.norm()) < 1e-9
        for ours, theirs in zip(reports, their_reports, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-9)


def open_group(start: Path, config: SftConfig | DpoConfig | RewardModelConfig) -> tuple[Any, Forks]:
    placement = DistributedConfig(backend="processes", learner_ranks=2, timeout_minutes=LONG / 60.0)
    forks = Forks([CPU, CPU])
    plan = SupervisedPlan(start=start, config=config, seed=0)
    return DistributedSupervised(plan, placement, RUNTIME, RankPool(forks, 300.0)), forks


def assert_saved_alike(folder: Path) -> None:
    """The models ``one`` and ``ranks`` have the same files, and weights that differ by rounding."""
    names = [sorted(path.name for path in (folder / name).iterdir()) for name in ("ranks", "one")]
    assert names[0] == names[1]
    ours, theirs = (load_policy(folder / name, device=CPU, dtype=torch.float32) for name in ("one", "ranks"))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-3, atol=1e-4)


def test_what_ranks_were_taught_is_saved_as_one_model(start: Path, tmp_path: Path) -> None:
    train, losses, gaps = demonstrations(9), dict[str, list[float]](), list[float]()
    group, _ = open_group(start, CONFIG)
    with closing(group):
        one = SftLearner(load_policy(start, device=CPU, dtype=torch.float32), CONFIG)
        for name, learner in (("ranks", group), ("one", one)):
            losses[name] = []
            run_sft_steps(
                learner, train, train, CONFIG, seed=0, report=lambda _, m, n=name: losses[n].append(m["sft/loss"])
            )
            learner.save_model(start, tmp_path / name)
            gaps.append(learner.shuffle_gap(train, seed=0).gap)
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-2, abs=1e-3)
    assert losses["ranks"] == pytest.approx(losses["one"], rel=1e-4)
    assert_saved_alike(tmp_path)


def test_a_lost_rank_ends_it_and_is_named(start: Path) -> None:
    group, forks = open_group(start, CONFIG)
    with closing(group):
        os.kill(forks.processes[1].pid, signal.SIGKILL)
        with pytest.raises(LearnerLostError, match="rank 1 was ended by SIGKILL"):
            group.step(demonstrations(3))
        assert not hasattr(group, "rewards")  # a method of DPO


def preferences(count: int) -> list[TokenPair]:
    draws = torch.Generator().manual_seed(1)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, strategies.VOCABULARY, (length,), generator=draws).tolist())

    sides = [(tokens(2 + n % 4), tokens(5 - n % 3)) for n in range(count)]
    pairs = [
        TokenPair(set_id=str(n), prompt_ids=(1, 2 + n % 5), chosen_ids=chosen, rejected_ids=rejected, margin=n / 10)
        for n, (chosen, rejected) in enumerate(sides)
    ]
    best, middle, worst = tokens(3), tokens(4), tokens(2)
    ranked = [
        TokenPair(set_id="ranked", prompt_ids=(1, 9, 9), chosen_ids=chosen, rejected_ids=rejected)
        for chosen, rejected in ((best, middle), (best, worst), (middle, worst))
    ]
    return [*pairs, *ranked]


def sides_of(pairs: list[TokenPair]) -> list[TokenSequence]:
    return [side for pair in pairs for side in pair.sides]


def fitted(
    held: Literal["full", "replicate"], dtype: torch.dtype, **settings: Any
) -> Callable[[Ranks], tuple[list[Any], Any, torch.Tensor, torch.Tensor]]:
    """Work for ranks: the reports and suspects of a fit, the scores after it, and the weights."""
    config, pairs = replace(REWARDS, **settings), preferences(9)

    def work(ranks: Ranks) -> tuple[list[Any], Any, torch.Tensor, torch.Tensor]:
        with strategies.double_precision() if dtype == torch.float64 else nullcontext():
            backbone: Any = strategies.tiny_llama(dtype=dtype)
            if config.backbone.lora.rank:
                backbone = add_lora(backbone, config.backbone.lora, "reward_model", seed=0)
            members = [member.to(dtype) for member in reward_members(backbone, config, seed=0)]
            if ranks.size > 1:
                roots = {id(member.backbone): member for member in reversed(members)}
                shard_models(roots.values(), ranks, ShardConfig() if held == "full" else None, device=CPU)
            learner, reports = RewardLearner(members, config), list[Any]()
            done = fit_reward_model(learner, pairs, config, seed=0, report=lambda _, m: reports.append(dict(m)))
            parameters = [parameter for member in members for parameter in member.parameters()]
            weights = torch.cat([gather_full(parameter.detach()).flatten().double() for parameter in parameters])
            margins = [(one.row, one.margin) for one in sorted(done.suspects, key=lambda one: one.row)]
            return reports, margins, learner.scores(sides_of(pairs)), weights

    return work


def assert_fitted_alike(size: int, folder: Path, tolerance: float, work: Callable[[Ranks], Any]) -> None:
    reports, margins, scores, weights = work(ONE)
    for their_reports, their_margins, their_scores, their_weights in on_ranks(size, work, folder):
        assert float((their_weights - weights).norm() / weights.norm()) < tolerance
        for ours, theirs in zip(reports, their_reports, strict=True):
            assert theirs == pytest.approx(ours, rel=tolerance, abs=tolerance)
        for (row, margin), (their_row, their_margin) in zip(margins, their_margins, strict=True):
            assert row == their_row and their_margin == pytest.approx(margin, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(their_scores, scores, rtol=max(tolerance, 1e-6), atol=1e-5)


def test_ranks_fit_the_reward_model_of_one_process(tmp_path: Path) -> None:
    # Some pairs of a prompt are in one row, which is longer than the budget: several passes for one backward pass.
    assert_fitted_alike(2, tmp_path, 1e-9, fitted("full", torch.float64, num_epochs=1))


@pytest.mark.scale
@pytest.mark.parametrize(
    ("held", "size", "dtype", "settings"),
    [
        ("full", 4, torch.float64, {}),
        ("replicate", 2, torch.float64, {}),
        ("full", 2, torch.float32, {"num_epochs": 1}),
        ("full", 4, torch.float32, {"num_epochs": 1}),
        ("full", 2, torch.float64, {"ensemble": 2, "backbone": BackboneConfig(trainable_layers=1)}),
        ("full", 2, torch.float32, {"ensemble": 2, "backbone": BackboneConfig(trainable_layers=0)}),
        ("replicate", 4, torch.float64, {"backbone": BackboneConfig(lora=LoraConfig(rank=2))}),
        ("full", 4, torch.float64, {"audit_folds": 3, "tokens_per_microbatch": 1000}),
    ],
)
def test_every_kind_of_reward_model_is_fitted_alike(
    held: Literal["full", "replicate"], size: int, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert_fitted_alike(size, tmp_path, tolerance, fitted(held, dtype, **settings))


@pytest.mark.parametrize(
    "backbone",
    [
        BackboneConfig(trainable_layers=1),
        *(
            pytest.param(each, marks=pytest.mark.scale)
            for each in (BackboneConfig(), BackboneConfig(trainable_layers=0))
        ),
    ],
)
def test_a_reward_model_of_ranks_is_saved_as_one_process_saves_it(
    backbone: BackboneConfig, start: Path, tmp_path: Path
) -> None:
    config, pairs, found = replace(REWARDS, num_epochs=1, ensemble=2, backbone=backbone), preferences(8), {}
    group, _ = open_group(start, config)
    with closing(group):
        members = reward_members(reward_backbone(start, backbone, RUNTIME, seed=0), config, seed=0)
        for name, learner in (("ranks", group), ("one", RewardLearner(members, config))):
            fit_reward_model(learner, pairs, config, seed=0, report=lambda *_: None)
            learner.save_model(start, tmp_path / name)
            scale = RewardScale(shift=0.0, scale=1.0)
            RewardScales(members=(scale, scale)).save(tmp_path / name)
            loaded = load_reward_model(load_policy(tmp_path / name, device=CPU, dtype=torch.float32), tmp_path / name)
            found[name] = loaded.rewards(sides_of(pairs), tokens_per_microbatch=64)
            torch.testing.assert_close(found[name], learner.scores(sides_of(pairs)), rtol=1e-5, atol=1e-5)
            learner.probe(sides_of(pairs)[:2])
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ranks", "one")]
    assert names[0] == names[1]
    torch.testing.assert_close(found["ranks"], found["one"], rtol=1e-3, atol=1e-4)


def preferred(
    held: Literal["full", "replicate"], dtype: torch.dtype, **settings: Any
) -> Callable[[Ranks], tuple[torch.Tensor, list[Any], torch.Tensor, torch.Tensor]]:
    """Work for ranks: the gradient of a second step of DPO, then the reports, margins and weights of a whole run."""
    config, pairs = replace(DPO, **settings), preferences(9)

    def make(ranks: Ranks) -> DpoLearner:
        policy: Any = strategies.tiny_llama(dtype=dtype)
        if config.lora.rank:
            policy = add_lora(policy, config.lora, "policy", seed=0).to(dtype)
        if ranks.size > 1:
            shard_models([policy], ranks, ShardConfig() if held == "full" else None, device=CPU)
        return DpoLearner(policy, config)

    def flat(tensors: Any) -> torch.Tensor:
        return torch.cat([gather_full(each.detach()).flatten().double() for each in tensors])

    def work(ranks: Ranks) -> tuple[torch.Tensor, list[Any], torch.Tensor, torch.Tensor]:
        with strategies.double_precision() if dtype == torch.float64 else nullcontext():
            gradients, learner, reports = list[torch.Tensor](), make(ranks), list[Any]()
            learner.begin(different_sequences(pairs), num_steps=2)
            steps = learner._steps.optimizer
            hook = steps.register_step_pre_hook(
                lambda *_: gradients.append(flat(each.grad for each in parameters_of(steps)))
            )
            for _ in range(2):  # the second is away from the reference
                learner.step(preference_sets(pairs))
            hook.remove()
            learner = make(ranks)
            margins = run_dpo_steps(
                learner, pairs, pairs[:4], config, seed=0, report=lambda _, found: reports.append(dict(found))
            )
            return gradients[1], reports, margins, flat(learner.model.parameters())

    return work


def assert_prefers_alike(size: int, folder: Path, tolerance: float, work: Callable[[Ranks], Any]) -> None:
    gradient, reports, margins, weights = work(ONE)
    assert float(gradient.norm()) > 0.0
    for their_gradient, their_reports, their_margins, their_weights in on_ranks(size, work, folder):
        assert float((their_gradient - gradient).norm() / gradient.norm()) < tolerance
        assert float((their_weights - weights).norm() / weights.norm()) < tolerance
        for step, (ours, theirs) in enumerate(zip(reports, their_reports, strict=True)):
            if not step:  # both sides have a reward of 0, and rounding decides which is the larger one
                theirs["dpo/accuracy"] = ours["dpo/accuracy"]
            assert theirs == pytest.approx(ours, rel=10 * tolerance, abs=10 * tolerance)
        torch.testing.assert_close(their_margins, margins, rtol=100 * tolerance, atol=10 * tolerance)


def test_ranks_learn_preferences_directly_as_one_process_does(tmp_path: Path) -> None:
    assert_prefers_alike(2, tmp_path, 1e-9, preferred("full", torch.float64, num_epochs=1))


@pytest.mark.scale
@pytest.mark.parametrize(
    ("held", "size", "dtype", "settings"),
    [
        ("full", 2, torch.float32, {}),
        ("full", 4, torch.float64, {}),
        ("full", 4, torch.float64, {"batch_size": 2}),  # fewer sets than ranks
        ("replicate", 2, torch.float64, {}),
        ("full", 2, torch.float64, {"tokens_per_microbatch": 1000}),
        ("replicate", 4, torch.float64, {"lora": LoraConfig(rank=2)}),
    ],
)
def test_every_layout_learns_preferences_directly_as_one_process_does(
    held: Literal["full", "replicate"], size: int, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert_prefers_alike(size, tmp_path, tolerance, preferred(held, dtype, **settings))


@pytest.mark.parametrize(
    "adapter", [LoraConfig(rank=2), pytest.param(LoraConfig(), marks=pytest.mark.scale)], ids=["adapter", "whole"]
)
def test_a_policy_of_ranks_that_learned_preferences_is_saved_as_one_process_saves_it(
    adapter: LoraConfig, start: Path, tmp_path: Path
) -> None:
    config, pairs = replace(DPO, num_epochs=1, lora=adapter), preferences(8)
    group, _ = open_group(start, config)
    with closing(group):
        one = DpoLearner(dpo_policy(start, config, RUNTIME, seed=0), config)
        margins = []
        for name, learner in (("ranks", group), ("one", one)):
            margins.append(run_dpo_steps(learner, pairs, pairs, config, seed=0, report=lambda *_: None))
            learner.save_model(start, tmp_path / name)
    torch.testing.assert_close(margins[0], margins[1], rtol=1e-3, atol=1e-4)
    assert_saved_alike(tmp_path)
