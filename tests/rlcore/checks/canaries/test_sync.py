"""Weights that did not arrive are found and named, and masks that are not the policy's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.canaries import LosesALayer, LosesTheHead, ServesTheBase, Session, Stale, Warmer, native
from rlcore.algorithms.agreement import LogprobAgreement, Spread
from rlcore.checks.canaries import sync
from rlcore.checks.canaries.masks import mask_canary, sample_canary
from rlcore.checks.canaries.sync import EngineCalibration, rollouts_canary, sample_probes, sync_canary
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.models.policy import score_sequences
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedCompletion, ScriptedSampler
from rlcore.text.packing import TokenSequence
from rlcore.training.scoring_models import token_scores
from rlcore.training.update_stats import FIRST_TOKENS
from rlcore.types import Prompt, Rollout
from tests import strategies

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

STEPS = [(torch.float32, 1e-7), (torch.bfloat16, 1e-7), (torch.bfloat16, 1e-3), (torch.float16, 1e-5)]

each_step = pytest.mark.parametrize(("dtype", "learning_rate"), STEPS)

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=16, num_samples=1)

TOKENIZER: Any = SimpleNamespace(eos_ids=(2,), decode=lambda ids: "")

PROMPTS = [
    Prompt(prompt_id=str(n), messages=(), token_ids=(1, 5 + n, 9 + n), reference="", task="test") for n in range(8)
]


class Late(NativeSampler):
    """Takes the weights and forgets the version."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        super().load_weights(state, policy_version=self.policy_version)


def session_of(kind: Callable[..., NativeSampler], dtype: torch.dtype, *, adapted: bool = False) -> Session:
    """A tiny learner beside an engine of that kind, which the canary takes for sound until it is asked."""
    model = strategies.tiny_llama()
    engine = native(model, TOKENIZER, dtype, kind)
    session = Session(model, engine, PROMPTS, dtype, rank=4 if adapted else 0, params=PARAMS)
    session.baseline = EngineCalibration(noise=Spread(0.0, 0.0), unverified=frozenset())
    return session


@each_step
@pytest.mark.parametrize("adapted", [False, True])
def test_complete_syncs_pass(adapted: bool, dtype: torch.dtype, learning_rate: float) -> None:
    session = session_of(NativeSampler, dtype, adapted=adapted)
    assert session.begin().unverified == frozenset()
    for _ in range(3):
        figures = session.step(learning_rate)
    assert set(figures) == {
        "sync/logprob_max_diff",
        "sync/log_odds_mean_diff",
        "sync/temperature_ratio",
        "sync/unverified_modules",
    }
    assert figures["sync/temperature_ratio"] == pytest.approx(1.0, abs=0.05)


LOST: list[tuple[Any, bool, str]] = [
    (Stale, False, "embedding|layer"), (Stale, True, "layer"),
    (LosesALayer, False, "in 1 modules: layer 1|in 2 modules: layer 1, vectors of layer 1"),
    (LosesTheHead, False, "in 1 modules: head"), (ServesTheBase, True, "layer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "adapted", "parts", "dtype", "learning_rate"),
    [(*LOST[0], *step) for step in STEPS] + [(*kind, *step) for kind in LOST[1:] for step in (STEPS[0], STEPS[2])],
)
def test_weights_that_did_not_arrive_are_found_and_named(
    kind: Callable[..., NativeSampler], adapted: bool, parts: str, dtype: torch.dtype, learning_rate: float
) -> None:
    """At the first step that shows in the engine's precision; up to then nothing is stale."""
    session = session_of(kind, dtype, adapted=adapted)
    session.begin()
    with pytest.raises(StaleSamplerError, match=parts):
        for _ in range(100):
            session.step(learning_rate)


@each_step
def test_a_temperature_that_is_off_by_a_tenth_is_found(dtype: torch.dtype, learning_rate: float) -> None:
    session = session_of(Warmer, dtype)
    with pytest.raises(CanaryError, match=r"1\.1\d\d times the trainer's temperature"):
        session.begin()
    with pytest.raises(CanaryError, match=r"1\.1\d\d times the trainer's temperature"):
        session.step(learning_rate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_vanishes_in_the_precision_of_the_engine_is_no_error(dtype: torch.dtype) -> None:
    session = session_of(Stale, dtype)
    session.begin()
    assert session.step(0.0)["sync/unverified_modules"] == 0.0


def test_what_is_computed_otherwise_from_the_right_weights_is_found() -> None:
    """An engine that rotates positions by another base: its weights are all there."""
    session = session_of(NativeSampler, torch.bfloat16)
    session.begin()
    session.engine._model.model.rotary_emb.inv_freq *= 0.5  # type: ignore[operator]
    with pytest.raises(CanaryError, match=r"of log-odds on average|times the trainer's temperature"):
        session.step(1e-5)


def test_a_part_that_an_engine_hides_is_left_to_the_log_probabilities() -> None:
    class Hides(Stale):
        def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
            return sorted({"layer 0", *super().differing_parts(state)})

    session = session_of(Hides, torch.bfloat16)
    assert session.begin().unverified == {"layer 0"}
    assert session.step(0.0)["sync/unverified_modules"] == 1.0
    with pytest.raises(StaleSamplerError, match=r"in . modules: embedding, head, layer 1"):
        session.step(1e-4)


def test_another_policy_version_is_stale() -> None:
    session = session_of(Late, torch.float32)
    session.begin()
    with pytest.raises(StaleSamplerError, match="version 0, the learner has 1"):
        session.step(1e-3)


def test_probes_that_were_sampled_before_the_sync_prove_nothing() -> None:
    session = session_of(NativeSampler, torch.float32)
    old = session.probes()
    session.begin()
    session.step(1e-3)
    with pytest.raises(StaleSamplerError, match="version 0, the learner has 1"):
        sync_canary(session.engine, old, session.truth, session.baseline)


def test_the_probes_are_a_function_of_weights_and_seed() -> None:
    session = session_of(NativeSampler, torch.bfloat16)
    assert session.probes() == session.probes()
    assert len(session.probes()) == 8
    assert max(len(probe.completion_ids) for probe in session.probes()) <= PARAMS.max_new_tokens


def rows(replica: int, count: int, *, shift: float = 0.0) -> torch.Tensor:
    """First tokens of an update, whose engine's log-probabilities are off by ``shift``."""
    learner = torch.rand(count, generator=torch.Generator().manual_seed(replica)).log() - 0.1
    return torch.stack([torch.full_like(learner, replica), learner + shift, learner, torch.ones(count)], dim=1)


def compared(first_tokens: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> list[dict[str, float]]:
    sound = EngineCalibration(noise=Spread(0.0, 0.0), unverified=frozenset({"head"}))
    return rollouts_canary(first_tokens, [sound, sound], temperature=1.0, dtype=dtype, seed=0)


def test_the_rollouts_of_each_engine_are_compared_alone() -> None:
    figures = compared(torch.cat([rows(0, 40), rows(1, 40)]))
    assert [each["sync/unverified_modules"] for each in figures] == [1.0, 1.0]
    assert max(each["sync/logprob_max_diff"] for each in figures) < 1e-6
    with pytest.raises(CanaryError, match=r"differ from the learner's by 0\.0"):
        compared(torch.cat([rows(0, 4000), rows(1, 4, shift=0.01)]))  # one in a thousand of all
    with pytest.raises(CanaryError, match=r"of log-odds on average|temperature"):
        compared(torch.cat([rows(0, 4000), rows(1, 40, shift=1.0)]), dtype=torch.bfloat16)
    assert len(compared(rows(1, 40))) == 1
    assert compared(torch.empty(0, 4)) == []


def test_as_many_tokens_are_compared_as_probes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LogprobAgreement] = []
    monkeypatch.setattr(sync, "check_agreement", lambda found, **_: seen.append(found))
    compared(torch.cat([rows(0, 40), rows(1, 4000)]))
    assert [each.num_tokens for each in seen] == [40, 256]
    assert sync.PROBE_TOKENS == FIRST_TOKENS


def test_an_engine_that_completes_nothing_is_stopped() -> None:
    engine = ScriptedSampler({"other": [ScriptedCompletion(completion_ids=(3,), sampler_logprobs=(-1.0,))]}, TOKENIZER)
    with pytest.raises(CanaryError, match="none of 8 probes: the script has no completion"):
        sample_probes(engine, PROMPTS, PARAMS, seed=0)


def test_the_learners_scores_come_in_the_order_of_the_completions() -> None:
    session = session_of(NativeSampler, torch.float32)
    probes = session.probes()
    logprobs, entropy = token_scores(session.policy, probes, temperature=0.8, tokens_per_microbatch=32)
    texts = [TokenSequence(prompt_ids=p.prompt.token_ids, completion_ids=p.completion_ids) for p in probes]
    expected = [score_sequences(session.policy, [t], tokens_per_microbatch=512, temperature=0.8)[0] for t in texts]
    assert torch.cat(expected).tolist() == pytest.approx(logprobs.tolist(), abs=1e-5)
    assert entropy.shape == logprobs.shape
    assert bool((entropy > 0.0).all())


EOS = frozenset({2, 7})


def rollout(**changes: object) -> Rollout:
    made = strategies.scored_rollout(1.0, completion_ids=(3, 4, 2)).rollout
    return dataclasses.replace(made, **changes)


SOUND = [
    rollout(),
    rollout(completion_ids=(3, 4, 7)),
    rollout(finish_reason="length", completion_ids=(3, 4, 5)),
    rollout(completion_ids=(7, 4, 2), loss_mask=(True, False, True)),
    rollout(completion_ids=(2, 2, 2), loss_mask=(True, False, True)),  # an EOS inside tool output is not trained on
    rollout(finish_reason="length", completion_ids=(2, 4, 3), loss_mask=(True, False, True)),
    rollout(completion_ids=(3, 2, 4), loss_mask=(True, False, True), num_sampled=2),  # an agent's stop strings
    rollout(finish_reason="length", completion_ids=(3, 4, 2)),  # a call for which there was no turn left
]


def test_whole_rollouts_pass() -> None:
    mask_canary(SOUND, EOS)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rollout(loss_mask=(True, True, False)), "EOS token is masked out"),
        (rollout(completion_ids=(3, 4, 5)), "its last token is no EOS"),
        (rollout(loss_mask=(True, True)), r"different lengths \[2, 3\]"),
        (rollout(sampler_logprobs=(-1.0,)), r"different lengths \[1, 3\]"),
        (rollout(loss_mask=(False, False, False)), "no token is trained on"),
        (rollout(loss_mask=(True, False, True)), "turn 1 precedes tool output, but does not end with EOS"),
        (rollout(completion_ids=(3, 2, 2)), "turn 1 continues after its EOS"),
        (
            rollout(finish_reason="length", completion_ids=(2, 4, 3), loss_mask=(True, False, False)),
            "ends with tokens that are not the policy's",
        ),
        (
            rollout(completion_ids=(3, 2, 4), loss_mask=(True, False, True), num_sampled=3),
            "2 tokens are trained on, and 3",
        ),
        (rollout(completion_ids=(), loss_mask=(), sampler_logprobs=()), "no token is trained on"),
    ],
)
def test_a_broken_rollout_is_found_among_whole_ones(broken: Rollout, message: str) -> None:
    with pytest.raises(CanaryError, match=rf"(?s)1 of 9 rollouts.*{message}"):
        mask_canary([*SOUND, broken], EOS)


BRANCH = rollout(completion_ids=(3, 4, 5, 2), loss_mask=(False, False, True, True), sampler_logprobs=(0.0,) * 4)


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (BRANCH, ""),
        (rollout(loss_mask=(False, False, False)), ""),  # not trained, as all its answers are another sample's
        (rollout(loss_mask=(True, True, False)), "EOS token is masked out"),
        (rollout(branches=(BRANCH,)), "a branch has branches of its own"),
        (rollout(prompt=dataclasses.replace(BRANCH.prompt, prompt_id="other")), "is of another prompt"),
    ],
)
def test_every_sample_of_an_episode_is_checked(branch: Rollout, message: str) -> None:
    episode = rollout(branches=(BRANCH, branch))
    if not message:
        mask_canary([*SOUND, episode], EOS)
        return
    with pytest.raises(CanaryError, match=rf"(?s)1 of 9 rollouts.*{message}"):
        mask_canary([*SOUND, episode], EOS)


def test_whole_training_samples_pass_and_broken_ones_are_found() -> None:
    sample = strategies.random_samples(0, num_prompts=1, group_size=1)[0]
    whole = torch.ones_like(sample.loss_mask)
    sample = dataclasses.replace(sample, completion_ids=(3,) * len(whole), loss_mask=whole)
    ends = dataclasses.replace(sample, completion_ids=(*sample.completion_ids[:-1], 2))
    sample_canary([sample, ends], EOS)
    masked = ends.loss_mask.clone()
    masked[-1] = False
    masked[0] = len(masked) > 1
    shorter = dataclasses.replace(sample)
    object.__setattr__(shorter, "old_logprobs", sample.old_logprobs[:-1])  # past the check of axes, which tests have
    faults = {
        "EOS token is masked out|no token": dataclasses.replace(ends, loss_mask=masked),
        "no token is trained on": dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)),
        "different lengths": shorter,
    }
    for message, broken in faults.items():
        with pytest.raises(CanaryError, match=rf"(?s)1 of 2 training samples.*{message}"):
            sample_canary([sample, broken], EOS)
