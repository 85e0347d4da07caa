"""Out of memory: the result is that of smaller micro-batches from the start, bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlcore.config import (
    BackboneConfig,
    KlConfig,
    LoraConfig,
    OptimConfig,
    RewardModelConfig,
    SftConfig,
    UpdateConfig,
)
from rlcore.errors import TrainingError
from rlcore.hardware.out_of_memory import longest_of, oom_retry, retry_smaller
from rlcore.hardware.sharded import Ranks, attach_ranks
from rlcore.models.heads import ScalarHeadModel, score_rewards, score_shared, score_values
from rlcore.models.lora import add_lora
from rlcore.models.policy import score_sequences
from rlcore.models.reward_ensemble import last_states
from rlcore.text.demonstrations import Demonstration
from rlcore.training.checkpoint import load_newest
from rlcore.training.label_audit import audit_features
from rlcore.training.learner import Learner
from rlcore.training.preferences import TokenPair
from rlcore.training.sft import SftLearner, run_sft_steps
from tests import learners, strategies
from tests.learners import save_checkpoint, train_reward_model, weights_of
from tests.small_memory import room_for

SAMPLES = strategies.random_samples(0, dtype=torch.float32, num_prompts=4, group_size=4)
SEQUENCES = strategies.random_sequences(0, num_prompts=4, group_size=4)
LONGEST = longest_of(SEQUENCES)


def make_learner(kind: str, *, tokens: int) -> Learner:
    """A learner of two steps over all samples, so that the first one finds what fits; everything is counted."""
    name, _, placement = kind.partition(" ")
    settings: dict[str, Any] = {
        "update": UpdateConfig(num_epochs=2, tokens_per_microbatch=tokens, entropy_coefficient=0.01),
        "kl": KlConfig(coefficient=0.1),
    }
    if placement == "shared":
        return learners.shared_learner(dtype=torch.float32, **settings)
    return learners.make_learner(name, dtype=torch.float32, **settings)


@pytest.mark.parametrize(
    ("kind", "fails"), [("grpo", "forward"), ("gspo", "backward"), ("ppo", "backward"), ("ppo shared", "forward")]
)
def test_oom_update_equals_small_micro_batches(
    kind: str, fails: Literal["forward", "backward"], caplog: pytest.LogCaptureFixture
) -> None:
    squeezed = make_learner(kind, tokens=400)
    with room_for(squeezed.policy, LONGEST + 20, fails=fails) as tried, caplog.at_level(logging.WARNING):
        stats = [squeezed.update(SAMPLES, seed=seed) for seed in (0, 1)]
    small = squeezed.tokens_per_microbatch
    assert LONGEST <= small <= LONGEST + 20 < max(tried)
    assert f"set update.tokens_per_microbatch = {small}" in caplog.text
    assert "retrying" in caplog.text and "Tried to allocate" not in stats[0].metrics
    assert sum(size > LONGEST + 20 for size in tried) == caplog.text.count(
        "out of memory: "
    )  # each met once, then never

    expected = make_learner(kind, tokens=small)
    assert [expected.update(SAMPLES, seed=seed) for seed in (0, 1)] == stats
    assert torch.equal(weights_of(squeezed.policy), weights_of(expected.policy))
    for ours, theirs in zip(squeezed.optimizers, expected.optimizers, strict=True):
        assert str(ours.state_dict()) == str(theirs.state_dict())


def test_error_if_one_sequence_does_not_fit() -> None:
    learner = make_learner("grpo", tokens=400)
    before = weights_of(learner.policy)
    with (
        room_for(learner.policy, LONGEST - 1),
        pytest.raises(TrainingError, match=f"sequence of {LONGEST} tokens") as e,
    ):
        learner.update(SAMPLES, seed=0)
    assert "hardware.gradient_checkpointing = true" in e.value.fix and "lora.rank" in e.value.fix
    assert torch.equal(weights_of(learner.policy), before)


def test_resumed_run_keeps_smaller_budget(tmp_path: Path) -> None:
    learner = make_learner("grpo", tokens=400)
    with room_for(learner.policy, LONGEST + 20):
        learner.update(SAMPLES, seed=0)
    save_checkpoint(tmp_path, 1, learner, run_state={"identity": {}})
    resumed = make_learner("grpo", tokens=400)
    load_newest(tmp_path, resumed, identity={})
    assert resumed.tokens_per_microbatch == learner.tokens_per_microbatch < 400


def scalar_model() -> ScalarHeadModel:
    return ScalarHeadModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(3))


PASSES: dict[str, Callable[[ScalarHeadModel, int], Any]] = {
    "policy": lambda model, n: score_sequences(model.backbone, SEQUENCES, tokens_per_microbatch=n),
    "values": lambda model, n: score_values(model, SEQUENCES, tokens_per_microbatch=n),
    "shared": lambda model, n: [
        torch.stack(both)
        for both in zip(*score_shared(model, SEQUENCES, tokens_per_microbatch=n, temperature=0.7), strict=True)
    ],
    "rewards": lambda model, n: score_rewards(model, SEQUENCES, tokens_per_microbatch=n),
    "states": lambda model, n: last_states(model.backbone, SEQUENCES, tokens_per_microbatch=n),
    "audit": lambda model, n: audit_features(model.backbone, SEQUENCES, tokens_per_microbatch=n),
}


@pytest.mark.parametrize("name", PASSES)
def test_scoring_pass_retries_smaller(name: str) -> None:
    model = scalar_model()
    with room_for(model.backbone, LONGEST) as tried:
        found = PASSES[name](model, 400)
    assert max(tried) > LONGEST
    for ours, expected in zip(found, PASSES[name](model, LONGEST), strict=True):
        assert torch.equal(ours, expected)
    with room_for(model.backbone, LONGEST - 1), pytest.raises(TrainingError, match="a single sequence"):
        PASSES[name](model, 400)


def test_sft_retries_smaller() -> None:
    demonstrations = [Demonstration(sequence=one, loss_mask=(True,) * len(one.completion_ids)) for one in SEQUENCES]

    def trained(model: Any, tokens: int) -> list[Any]:
        config = SftConfig(num_steps=4, batch_size=12, learning_rate=1e-2, tokens_per_microbatch=tokens)
        reports: list[Any] = []
        report = lambda step, metrics: reports.append((step, dict(metrics)))  # noqa: E731
        run_sft_steps(SftLearner(model, config), demonstrations, demonstrations, config, seed=0, report=report)
        return [*reports, weights_of(model).tolist()]

    squeezed = strategies.tiny_llama()
    with room_for(squeezed, LONGEST, fails="backward") as tried:
        found = trained(squeezed, 400)
    assert max(tried) > LONGEST
    assert found == trained(strategies.tiny_llama(), LONGEST)


@pytest.mark.parametrize(("is_adapter", "fails"), [(False, "forward"), (True, "backward")])
def test_reward_model_retries_smaller(is_adapter: bool, fails: Literal["forward", "backward"]) -> None:
    pairs = [
        TokenPair(set_id=str(i), prompt_ids=one.prompt_ids, chosen_ids=one.completion_ids, rejected_ids=(5, 6, 7))
        for i, one in enumerate(SEQUENCES)
    ]
    room = max(len(p.prompt_ids) + len(p.chosen_ids) + 3 for p in pairs)

    def trained(tokens: int, limit: int) -> tuple[list[Any], list[int]]:
        adapter = LoraConfig(rank=2) if is_adapter else LoraConfig()
        backbone = strategies.tiny_llama()
        base = add_lora(backbone, adapter, "reward_model", seed=0) if is_adapter else backbone
        model = ScalarHeadModel.with_random_head(base, torch.Generator().manual_seed(0))
        config = RewardModelConfig(
            num_epochs=1,
            batch_size=8,
            learning_rate=1e-2,
            head_learning_rate=1e-2,
            tokens_per_microbatch=tokens,
            backbone=BackboneConfig(lora=adapter),
        )
        reports: list[Any] = []
        with room_for(backbone, limit, fails=fails) as tried:
            train_reward_model(model, pairs, config, seed=0, report=lambda step, m: reports.append((step, dict(m))))
        return [*reports, weights_of(model).tolist()], tried

    found, tried = trained(400, room)
    assert max(tried) > room
    # Halved until it fits: the same as if that had been set.
    budget = 400
    while budget > room:
        budget = max(longest_of([side for pair in pairs for side in pair.sides]), budget // 2)
    assert found == trained(budget, 10_000)[0]


def test_budget_is_halved_down_to_longest_sequence() -> None:
    tried: list[int] = []

    def attempt(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 9:
            raise torch.OutOfMemoryError("full")
        return "done"

    assert retry_smaller(attempt, 100, longest=9) == ("done", 9)
    assert tried == [100, 50, 25, 12, 9]
    with pytest.raises(TrainingError, match="a single sequence of 10 tokens: full"):
        retry_smaller(attempt, 100, longest=10)


def test_other_errors_are_raised() -> None:
    def attempt(tokens: int) -> None:
        raise RuntimeError("another")

    with pytest.raises(RuntimeError, match="another"):
        retry_smaller(attempt, 100, longest=1)


def test_error_if_moments_do_not_fit() -> None:
    learner = make_learner("grpo", tokens=400)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    learner.optimizer.register_step_pre_hook(full)
    before = copy.deepcopy(weights_of(learner.policy))
    with pytest.raises(TrainingError, match="optimizer's step") as error:
        learner.update(SAMPLES, seed=0)
    assert OptimConfig(kind="adamw_8bit").kind in error.value.fix
    assert torch.equal(weights_of(learner.policy), before)


def test_single_rank_does_not_retry() -> None:
    tried = []

    @oom_retry
    def score(model: Any, sequences: Any, *, tokens_per_microbatch: int) -> None:
        tried.append(tokens_per_microbatch)
        raise torch.OutOfMemoryError

    model = strategies.tiny_llama()
    attach_ranks(model, Ranks(0, 2))
    with pytest.raises(torch.OutOfMemoryError):
        score(model, strategies.random_sequences(0), tokens_per_microbatch=64)
    assert tried == [64]
