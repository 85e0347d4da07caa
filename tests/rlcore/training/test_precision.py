"""Half-precision products over float32 weights, on the CPU, and the scale of a float16 loss."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import KlConfig, SamplingConfig
from rlcore.hardware.precision import autocast, cast_linears, compute_dtype, set_compute_dtype
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import hidden_states
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.checkpoint import load_newest
from rlcore.training.learner import ROUNDING, Learner
from rlcore.training.optim import GROWTH_INTERVAL, LARGEST, LossScale
from rlcore.types import Score
from tests import strategies
from tests.learners import experience_of, gradients_of, on_policy_samples, save_checkpoint, update_config, weights_of
from tests.rlcore.models.test_attention import tree_llama

HALVES = [torch.bfloat16, torch.float16]
PRECISIONS = [torch.float32, *HALVES]


def model_in(dtype: torch.dtype) -> LlamaForCausalLM:
    """A model as a run loads it, initialised softly as a real one is: bfloat16 has 3 digits."""
    return set_compute_dtype(tree_llama(initializer_range=0.1), dtype)


def sequences(count: int) -> list[TokenSequence]:
    return [strategies.random_sequences(seed, num_prompts=1, group_size=1)[0] for seed in range(count)]


def learner(dtype: torch.dtype, *, again: bool = False, name: str = "grpo", **settings: object) -> Learner:
    model, critic = model_in(dtype), None
    if ALGORITHMS[name].uses_critic:
        critic = ScalarHeadModel.with_random_head(model_in(dtype), torch.Generator().manual_seed(2))
    config = strategies.rl_config(name, **({"update": update_config()} | settings))
    return Learner(
        enable_gradient_checkpointing(model) if again else model, critic, algorithm=ALGORITHMS[name], config=config
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("again", [False, True])
def test_half_precision_gradients_are_close(dtype: torch.dtype, again: bool) -> None:
    samples = on_policy_samples(tree_llama(initializer_range=0.1))
    exact = gradients_of(learner(torch.float32), samples)
    half = learner(dtype, again=again)
    ours = gradients_of(half, samples)
    assert ours.dtype == torch.float32
    assert {parameter.dtype for parameter in half.policy.parameters()} == {torch.float32}
    assert {state["exp_avg"].dtype for state in half.optimizer.state.values()} == {torch.float32}
    assert not torch.equal(ours, exact)  # it was half precision indeed
    assert float((ours - exact).norm() / exact.norm()) < (0.05 if dtype == torch.bfloat16 else 0.007)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_second_update_uses_new_weights(dtype: torch.dtype) -> None:
    samples = on_policy_samples(tree_llama(initializer_range=0.1))
    one = learner(dtype)
    one.update(samples, seed=0)
    # Another learner starts from the same weights and optimizer; nothing that the first has cached is there.
    other = learner(dtype)
    other.policy.load_state_dict(one.policy.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # somebody's own context, open all the time, changes nothing
        one.update(samples, seed=1)
    other.update(samples, seed=1)
    assert torch.equal(weights_of(one.policy), weights_of(other.policy))


@pytest.mark.parametrize(
    ("dtype", "name", "temperature"),
    [
        (torch.float32, "gspo", 1.7),
        (torch.bfloat16, "grpo", 1.0),
        (torch.bfloat16, "gspo", 1.7),
        (torch.bfloat16, "ppo", 1.7),
        (torch.float16, "grpo", 1.7),
        (torch.float16, "gspo", 1.0),
        (torch.float16, "ppo", 1.0),
    ],
)
def test_ratio_is_one_before_policy_moves(dtype: torch.dtype, name: str, temperature: float) -> None:
    # Several steps, none of which moves a weight: each compares with log-probabilities of a pass of its own.
    subject = learner(
        dtype,
        name=name,
        learning_rate=1e-30,
        sampling=SamplingConfig(temperature=temperature, max_new_tokens=8),
        update=update_config(num_minibatches=2, num_epochs=2),
    )
    groups = strategies.random_groups(subject.policy, 3, num_prompts=6, group_size=4)
    models = (subject.policy, None, subject.critic)
    experience = experience_of(groups, subject.algorithm, *models, temperature=temperature)
    metrics = subject.update(experience.samples, seed=0).metrics
    assert metrics["clip/fraction"] == 0.0
    assert metrics["kl/old"] < 1e-10


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_kl_to_start_is_zero_without_signal(dtype: torch.dtype, tied: bool) -> None:
    policy = set_compute_dtype(tree_llama(initializer_range=0.1, tie_word_embeddings=tied), dtype)
    reference = cast_linears(tree_llama(initializer_range=0.1, tie_word_embeddings=tied), dtype)
    assert reference.model.layers[0].mlp.up_proj.weight.dtype == dtype
    config = strategies.rl_config("grpo", kl=KlConfig(coefficient=0.1), update=update_config())
    subject = Learner(policy, None, algorithm=ALGORITHMS["grpo"], config=config)
    groups = strategies.random_groups(policy, 3, num_prompts=4, group_size=4)
    equal = [[replace(item, score=Score(value=1.0, terms={})) for item in group] for group in groups]
    experience = experience_of(equal, subject.algorithm, policy, reference, kl=config.kl, kl_coefficient=0.1)
    before = weights_of(policy)
    stats = subject.update(experience.samples, seed=0)
    assert stats.metrics["kl/ref"] < 1e-12
    assert stats.metrics["gradient_norm"] < ROUNDING
    # Adam would make a whole step of any gradient, however small.
    assert not stats.moved
    assert torch.equal(weights_of(policy), before)


@pytest.mark.parametrize("dtype", HALVES)
def test_scalar_head_computes_in_float32(dtype: torch.dtype) -> None:
    backbone = model_in(dtype)
    model = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(0))
    batch = pack(sequences(3), tokens_per_microbatch=64)[0]
    states = hidden_states(backbone, batch).flatten(0, 1)[batch.last_positions]
    exact = states.double() @ model.head.weight.double()[0]
    with torch.autocast("cpu", dtype=dtype):
        scores = model.sequence_scores(batch)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)
    assert len(set(scores.tolist())) == len(scores)


def test_compute_dtype_ignores_autocast() -> None:
    model = tree_llama()
    assert compute_dtype(model) == torch.float32
    batch = pack(sequences(1), tokens_per_microbatch=64)[0]
    exact = hidden_states(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hidden_states(model, batch), exact)
    assert not torch.equal(hidden_states(set_compute_dtype(model, torch.bfloat16), batch), exact)
    assert compute_dtype(tree_llama().to(torch.bfloat16)) == torch.bfloat16
    with autocast(tree_llama().to(torch.bfloat16)):
        assert not torch.is_autocast_enabled("cpu")


def test_overflowing_float16_gradient_is_recomputed() -> None:
    samples = on_policy_samples(tree_llama(initializer_range=0.1))
    fine, overflown = learner(torch.float16), learner(torch.float16)
    fine.loss_scale = LossScale(2.0**10, 0, adapts=True)
    overflown.loss_scale = LossScale(2.0**40, 0, adapts=True)  # far beyond what float16 holds
    expected, ours = fine.update(samples, seed=0), overflown.update(samples, seed=0)
    assert 2.0**10 <= overflown.loss_scale.value < 2.0**40
    assert ours.metrics["entropy"] == expected.metrics["entropy"]
    assert ours.metrics["loss/policy"] == expected.metrics["loss/policy"]
    assert ours.metrics["gradient_norm"] == pytest.approx(expected.metrics["gradient_norm"], rel=1e-2)
    assert float((weights_of(overflown.policy) - weights_of(fine.policy)).abs().max()) < 2.1 * fine.config.learning_rate


def test_loss_scale_is_resumed(tmp_path: Path) -> None:
    saved, restored = learner(torch.float16), learner(torch.float16)
    saved.loss_scale = LossScale(512.0, 17, adapts=True)
    save_checkpoint(tmp_path, 1, saved, run_state={})
    load_newest(tmp_path, restored, identity={})
    assert restored.loss_scale == saved.loss_scale


CLEAN_RUN = [True] * GROWTH_INTERVAL


def scale_after(scale: LossScale, *steps: bool) -> LossScale:
    for is_clean in steps:
        scale = scale.after_step() if is_clean else scale.after_overflow()
    return scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_have_no_loss_scale(dtype: torch.dtype) -> None:
    scale = LossScale.of(set_compute_dtype(strategies.tiny_llama(), dtype))
    assert scale == LossScale(1.0, 0, adapts=False)
    assert scale_after(scale, *CLEAN_RUN, *CLEAN_RUN) == scale
    assert not scale.can_shrink


def test_one_float16_model_has_loss_scale() -> None:
    models = strategies.tiny_llama(), set_compute_dtype(strategies.tiny_llama(), torch.float16)
    assert LossScale.of(*models) == LossScale(2.0**15, 0, adapts=True)


def test_loss_scale_grows_after_clean_steps() -> None:
    start = LossScale(8.0, 0, adapts=True)
    assert scale_after(start, *CLEAN_RUN[1:]).value == 8.0
    assert scale_after(start, *CLEAN_RUN) == LossScale(16.0, 0, adapts=True)
    assert scale_after(start, *CLEAN_RUN[1:], False, *CLEAN_RUN[1:]) == LossScale(4.0, GROWTH_INTERVAL - 1, adapts=True)


def test_loss_scale_is_bounded() -> None:
    assert scale_after(LossScale(LARGEST, 0, adapts=True), *CLEAN_RUN).value == LARGEST
    assert LossScale(2.0, 0, adapts=True).can_shrink
    assert not LossScale(1.0, 0, adapts=True).can_shrink
