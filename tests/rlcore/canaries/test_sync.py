"""The sync canary through the native engine: silent after sound syncs, each fault found, at any step and precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.canaries import Baseline, Truth, first_canary, sample_probes, sync_canary, token_scores
from rlcore.canaries.agreement import Spread
from rlcore.config import AdapterConfig
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.models.lora import AdaptedModel, MergedState, add_adapter, merged_state
from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.models.precision import compute_in
from rlcore.packing import TokenSequence, pack
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedCompletion, ScriptedSampler
from rlcore.types import FailedRollout, Prompt, Rollout
from tests import strategies

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = [1e-7, 1e-5, 1e-3]
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=16, num_samples=1)
TOKENIZER: Any = SimpleNamespace(eos_ids=(2,), decode=lambda ids: "")
PROMPTS = [
    Prompt(prompt_id=str(n), messages=(), token_ids=(1, 5 + n, 9 + n), reference="", task="test") for n in range(8)
]


class Stale(NativeSampler):
    """Takes the version and keeps its weights."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self.policy_version = policy_version


class LosesALayer(NativeSampler):
    """Keeps the old weights of the last layer."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items() if "layers.1." in name}
        super().load_weights({**state, **kept}, policy_version=policy_version)


class LosesTheHead(NativeSampler):
    """Multiplies by a copy of the tied head that no sync renews, as vLLM does on a CPU."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().clone())

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        head = {"lm_head.weight": self._model.lm_head.weight.detach().clone()}
        super().load_weights({**state, **head}, policy_version=policy_version)


class ServesTheBase(NativeSampler):
    """Never applies the adapter."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        assert isinstance(state, MergedState)
        super().load_weights(merged_state(AdaptedModel(state.adapted.base, "")), policy_version=policy_version)


class Warmer(NativeSampler):
    """Samples at a temperature that is a tenth too high."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        return super().sample(prompts, replace(params, temperature=params.temperature + 0.1), seed=seed, places=places)


class Late(NativeSampler):
    """Takes the weights and forgets the version."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        super().load_weights(state, policy_version=self.policy_version)


class Session:
    """A learner and an engine of a class, in one precision; ``adapted``: the learner is an adapter on a frozen base."""

    def __init__(
        self, kind: Callable[..., NativeSampler], dtype: torch.dtype, *, adapted: bool = False, seed: int = 0
    ) -> None:
        whole = strategies.tiny_llama(seed)
        self.dtype = dtype
        self.engine = kind(copy.deepcopy(whole).to(dtype), TOKENIZER)
        self.policy: Any = compute_in(whole, dtype)
        if adapted:
            base = copy.deepcopy(whole).to(dtype)
            self.policy = add_adapter(base, AdapterConfig(rank=4, alpha=16), "policy", seed=seed)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=0.0)
        self.version = 0
        self.baseline = Baseline(noise=Spread(0.0, 0.0), hidden=frozenset())

    @property
    def truth(self) -> Truth:
        score = partial(token_scores, self.policy, temperature=PARAMS.temperature, tokens_per_microbatch=512)
        state = merged_state(self.policy)
        return Truth(state=state, policy_version=self.version, score=score, dtype=self.dtype)

    def begin(self) -> Baseline:
        self.baseline = first_canary(self.engine, self.probes(), self.truth)
        return self.baseline

    def probes(self) -> list[Rollout]:
        return sample_probes(self.engine, PROMPTS, PARAMS, seed=self.version)

    def step(self, learning_rate: float) -> dict[str, float]:
        """An optimizer's step on the likelihood of what the engine samples, a sync, and its canary."""
        self.optimizer.param_groups[0]["lr"] = learning_rate
        texts = [TokenSequence(prompt_ids=p.token_ids, completion_ids=(3, 4, 8, 2)) for p in PROMPTS]
        score_sequences_with_gradient(self.policy, texts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self.engine.load_weights(merged_state(self.policy), policy_version=self.version)
        return sync_canary(self.engine, self.probes(), self.truth, self.baseline)


def score_sequences_with_gradient(policy: Any, texts: Sequence[TokenSequence]) -> torch.Tensor:
    """Mean negative log-probability of texts."""
    (batch,) = pack(texts, tokens_per_microbatch=4096)
    return -completion_logprobs(policy, batch)[0].mean()


@pytest.mark.parametrize("learning_rate", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adapted", [False, True])
def test_sound_syncs_pass(adapted: bool, dtype: torch.dtype, learning_rate: float) -> None:
    session = Session(NativeSampler, dtype, adapted=adapted)
    assert session.begin().hidden == frozenset()
    for _ in range(3):
        figures = session.step(learning_rate)
    assert set(figures) == {"sync/max_abs", "sync/log_odds", "sync/temperature", "sync/hidden_parts"}
    assert figures["sync/temperature"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("learning_rate", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "adapted", "parts"),
    [
        (Stale, False, "embedding|layer"),
        (Stale, True, "layer"),
        (LosesALayer, False, "in 1 parts: layer 1|in 2 parts: layer 1, vectors of layer 1"),
        (LosesTheHead, False, "in 1 parts: head"),
        (ServesTheBase, True, "layer"),
    ],
)
def test_weights_that_did_not_arrive_are_found_and_named(
    kind: Callable[..., NativeSampler], adapted: bool, parts: str, dtype: torch.dtype, learning_rate: float
) -> None:
    """At the first step that shows in the engine's precision; up to then nothing is stale."""
    session = Session(kind, dtype, adapted=adapted)
    session.begin()
    with pytest.raises(StaleSamplerError, match=parts):
        for _ in range(100):
            session.step(learning_rate)


@pytest.mark.parametrize("learning_rate", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_temperature_that_is_off_by_a_tenth_is_found(dtype: torch.dtype, learning_rate: float) -> None:
    session = Session(Warmer, dtype)
    with pytest.raises(CanaryError, match=r"1\.1\d\d times the trainer's temperature"):
        session.begin()
    with pytest.raises(CanaryError, match=r"1\.1\d\d times the trainer's temperature"):
        session.step(learning_rate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_vanishes_in_the_engines_precision_is_no_fault(dtype: torch.dtype) -> None:
    session = Session(Stale, dtype)
    session.begin()
    assert session.step(0.0)["sync/hidden_parts"] == 0.0


def test_what_is_computed_otherwise_from_the_right_weights_is_found() -> None:
    """An engine that rotates positions by another base: its weights are all there."""
    session = Session(NativeSampler, torch.bfloat16)
    session.begin()
    session.engine._model.model.rotary_emb.inv_freq *= 0.5  # type: ignore[operator]
    with pytest.raises(CanaryError, match=r"of log-odds on average|times the trainer's temperature"):
        session.step(1e-5)


def test_a_part_that_an_engine_hides_is_left_to_the_log_probabilities() -> None:
    class Hides(Stale):
        def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
            return sorted({"layer 0", *super().differing_parts(state)})

    session = Session(Hides, torch.bfloat16)
    assert session.begin().hidden == {"layer 0"}
    assert session.step(0.0)["sync/hidden_parts"] == 1.0
    with pytest.raises(StaleSamplerError, match=r"in . parts: embedding, head, layer 1"):
        session.step(1e-4)


def test_another_policy_version_is_stale() -> None:
    session = Session(Late, torch.float32)
    session.begin()
    with pytest.raises(StaleSamplerError, match="version 0, the learner has 1"):
        session.step(1e-3)


def test_probes_that_were_sampled_before_the_sync_prove_nothing() -> None:
    session = Session(NativeSampler, torch.float32)
    old = session.probes()
    session.begin()
    session.step(1e-3)
    with pytest.raises(StaleSamplerError, match="version 0, the learner has 1"):
        sync_canary(session.engine, old, session.truth, session.baseline)


def test_the_probes_are_a_function_of_weights_and_seed() -> None:
    session = Session(NativeSampler, torch.bfloat16)
    assert session.probes() == session.probes()
    assert len(session.probes()) == 8
    assert max(len(probe.completion_ids) for probe in session.probes()) <= PARAMS.max_new_tokens


def test_an_engine_that_completes_nothing_is_stopped() -> None:
    engine = ScriptedSampler({"other": [ScriptedCompletion(completion_ids=(3,), sampler_logprobs=(-1.0,))]}, TOKENIZER)
    with pytest.raises(CanaryError, match="none of 8 probes: the script has no completion"):
        sample_probes(engine, PROMPTS, PARAMS, seed=0)


def test_the_learners_scores_come_in_the_order_of_the_completions() -> None:
    session = Session(NativeSampler, torch.float32)
    probes = session.probes()
    logprobs, entropy = token_scores(session.policy, probes, temperature=0.8, tokens_per_microbatch=32)
    texts = [TokenSequence(prompt_ids=p.prompt.token_ids, completion_ids=p.completion_ids) for p in probes]
    expected = [score_sequences(session.policy, [t], tokens_per_microbatch=512, temperature=0.8)[0] for t in texts]
    assert torch.cat(expected).tolist() == pytest.approx(logprobs.tolist(), abs=1e-5)
    assert entropy.shape == logprobs.shape
    assert bool((entropy > 0.0).all())
