"""Each canary is silent on a sound run and stops a run in which its fault was planted."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.canaries import (
    SyncProbe,
    check_probes,
    known_answer,
    mask_canary,
    reward_canary,
    reward_probes,
    sample_canary,
    sync_canary,
)
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.models.policy import score_sequences
from rlcore.packing import TokenSequence
from rlcore.rewards.base import RewardFn, graded, ungraded
from rlcore.rewards.math_answer import MathReward
from rlcore.rewards.procedural import ProceduralReward
from rlcore.types import Prompt, Rollout, Score
from tests import strategies

EOS = frozenset({2, 7})
PROBE = SyncProbe(prompt_ids=(1, 5, 9), completion_ids=(3, 4, 8, 2))


def prompt(reference: str) -> Prompt:
    return Prompt(prompt_id="p1", messages=(), token_ids=(1,), reference=reference, task="test")


NUMBERS = [prompt("35"), prompt("-1/2"), prompt("50%"), prompt("so 1 + 1 = 2\n#### 2")]


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    reward = MathReward()
    yield reward
    reward.close()


class Constant:
    """A broken reward: every answer gets the same."""

    name = "math"

    def __init__(self, score: Score) -> None:
        self._score = score

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score] * len(rollouts)


class AnyNumber:
    """A broken reward: it sees that there is a number, not which."""

    name = "math"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [graded("math", float(any(map(str.isdigit, rollout.text)))) for rollout in rollouts]


def test_a_sound_verifier_passes(math: MathReward) -> None:
    reward_canary(math, [*NUMBERS, prompt(r"\frac{\sqrt{8}}{2}"), prompt("Paris")])


def test_where_the_template_begins_the_thinking_the_probes_end_it() -> None:
    reward = MathReward(prefill="<think>\n")
    reward_canary(reward, NUMBERS, prefill="<think>\n")
    with pytest.raises(CanaryError, match="right answer '<answer>35</answer>'"):
        reward_canary(reward, NUMBERS)  # no answer at all to this verifier
    reward.close()


def test_a_sound_procedural_verifier_passes() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0]
    reward = ProceduralReward()
    reward_canary(reward, [prompt(json.dumps({"dataset": "chain_sum", "entry": entry}))])
    reward.close()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Constant(graded("math", 0.0)), "4 of 16 .*right answer '<answer>35</answer>' for '35' scored 0.0"),
        (Constant(graded("math", 1.0)), "12 of 16 .*wrong answer '' for '35' scored 1.0"),
        (Constant(ungraded("signal only works in main thread")), "was not scored: signal only works"),
        (Constant(graded("math", float("nan"))), "16 of 16"),
        (AnyNumber(), "4 of 16 .*wrong answer '<answer>36</answer>' for '35' scored 1.0"),
    ],
)
def test_a_broken_verifier_is_stopped_and_its_misjudged_answers_named(broken: RewardFn, message: str) -> None:
    with pytest.raises(CanaryError, match=f"(?s){message}"):
        reward_canary(broken, NUMBERS)


def test_a_reward_of_another_kind_than_the_references_is_stopped(math: MathReward) -> None:
    reference = json.dumps({"dataset": "chain_sum", "entry": {"question": "3 + 4?", "answer": "7", "metadata": {}}})
    with pytest.raises(CanaryError, match="right answer '<answer>7</answer>'"):
        reward_canary(math, [prompt(reference)])


def test_without_probes_nothing_is_proven() -> None:
    with pytest.raises(CanaryError, match="no probes"):
        check_probes(Constant(graded("math", 1.0)), [])


def test_the_known_answer_is_the_references_own() -> None:
    assert known_answer(prompt("so 2\n#### 2")) == "2"
    assert known_answer(prompt('{"dataset": "d", "entry": {"answer": "7"}}')) == "7"
    assert known_answer(prompt("{1, 2}")) == "{1, 2}"
    assert known_answer(prompt('{"style": "stdin", "solution": "print(1)"}')) == "\n```python\nprint(1)\n```\n"


def test_a_number_is_probed_with_its_neighbour() -> None:
    texts = [probe.rollout.text for probe in reward_probes(prompt("-1/2"))]
    assert texts == ["<answer>-1/2</answer>", "", "<answer>this is no answer</answer>", "<answer>1/2</answer>"]


class Engine:
    """A rollout engine on its own copy of the weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.policy_version = 0
        self._model = copy.deepcopy(model)

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._model.load_state_dict(state)
        self.policy_version = policy_version

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        assert temperature == 1.0
        return logprobs_of(self._model, prompt_ids, completion_ids)

    def sample(self, prompts, params, *, seed, places=None):
        raise NotImplementedError


class DeafEngine(Engine):
    """Takes the version and keeps its weights."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self.policy_version = policy_version


class HalfDeafEngine(Engine):
    """Takes the weights of the first layer and no other."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        part = {name: value for name, value in state.items() if "layers.0." in name}
        self._model.load_state_dict(part, strict=False)
        self.policy_version = policy_version


class LateEngine(Engine):
    """Takes the weights and forgets the version."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._model.load_state_dict(state)


def logprobs_of(model: LlamaForCausalLM, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
    sequence = TokenSequence(prompt_ids=tuple(prompt_ids), completion_ids=tuple(completion_ids))
    found: list[float] = score_sequences(model, [sequence], tokens_per_microbatch=64)[0].tolist()
    return found


def sync(
    engine: Engine, step: float, *, dtype: torch.dtype = torch.float32, took_step: bool = True
) -> dict[str, float]:
    """Move a copy of the learner by ``step`` in every weight, push it to the engine, and ask the canary."""
    learner = strategies.tiny_llama()
    generator = torch.Generator().manual_seed(0)
    before = engine.logprobs(PROBE.prompt_ids, PROBE.completion_ids, temperature=1.0)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter += step * torch.randn(parameter.shape, generator=generator)
    engine.load_weights(learner.state_dict(), policy_version=1)
    return sync_canary(
        engine,
        lambda probe: logprobs_of(learner, probe.prompt_ids, probe.completion_ids),
        [PROBE, PROBE],
        policy_version=1,
        before=[before, before] if took_step else None,
        dtype=dtype,
    )


@pytest.mark.parametrize("step", [1e-6, 1e-4, 1e-2])
def test_an_engine_that_took_the_weights_passes(step: float) -> None:
    figures = sync(Engine(strategies.tiny_llama()), step)
    assert figures["sync/max_abs"] < 1e-5
    assert figures["sync/moved"] > 0.0


def test_without_a_step_nothing_has_to_move() -> None:
    assert sync(Engine(strategies.tiny_llama()), 0.0, took_step=False) == {"sync/max_abs": 0.0}


@pytest.mark.parametrize("step", [1e-6, 1e-4, 1e-2])
def test_stale_weights_are_found_however_small_the_step(step: float) -> None:
    with pytest.raises((StaleSamplerError, CanaryError)):
        sync(DeafEngine(strategies.tiny_llama()), step)


def test_a_small_step_that_did_not_arrive_is_within_the_bound_and_still_found() -> None:
    with pytest.raises(StaleSamplerError, match="the engine did not"):
        sync(DeafEngine(strategies.tiny_llama()), 1e-6)


@pytest.mark.parametrize(("step", "message"), [(2e-5, "only a part of the weights"), (1e-2, "differ from the learner")])
def test_a_partial_sync_is_found(step: float, message: str) -> None:
    """At 2e-5 every token is within the bound of 1e-3; the engine is not closer to the learner than it was, though."""
    with pytest.raises(CanaryError, match=message):
        sync(HalfDeafEngine(strategies.tiny_llama()), step)


def test_another_policy_version_is_stale() -> None:
    with pytest.raises(StaleSamplerError, match="version 0, the learner has 1"):
        sync(LateEngine(strategies.tiny_llama()), 1e-2)


def test_an_engine_that_computes_nan_is_stopped() -> None:
    model = strategies.tiny_llama()
    engine = Engine(model)
    engine.logprobs = lambda *ids, temperature: [float("nan")] * len(PROBE.completion_ids)  # type: ignore[method-assign]
    with pytest.raises(CanaryError, match="by nan"):
        sync(engine, 1e-4)


def test_an_engine_that_loses_a_token_is_stopped() -> None:
    engine = Engine(strategies.tiny_llama())
    engine.logprobs = lambda *ids, temperature: [-1.0]  # type: ignore[method-assign]
    with pytest.raises(CanaryError, match="8 tokens for the learner and 2 for the engine"):
        sync(engine, 1e-4)


def test_bfloat16_has_a_wider_bound() -> None:
    with pytest.raises(CanaryError):
        sync(HalfDeafEngine(strategies.tiny_llama()), 1e-2, took_step=False)
    assert sync(HalfDeafEngine(strategies.tiny_llama()), 1e-2, took_step=False, dtype=torch.bfloat16)


def test_in_bfloat16_a_step_that_vanishes_in_rounding_is_no_fault_and_a_visible_one_that_is_lost_is() -> None:
    assert sync(DeafEngine(strategies.tiny_llama()), 1e-5, dtype=torch.bfloat16)["sync/moved"] == 0.0
    with pytest.raises(CanaryError, match="only a part"):
        sync(DeafEngine(strategies.tiny_llama()), 2.5e-3, dtype=torch.bfloat16)


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
        (rollout(loss_mask=(True, False, True)), "turn 1 is followed by tool output, but ends with no EOS"),
        (rollout(completion_ids=(3, 2, 2)), "turn 1 goes on after its EOS"),
        (
            rollout(finish_reason="length", completion_ids=(2, 4, 3), loss_mask=(True, False, False)),
            "ends with tokens that are not the policy's",
        ),
        (rollout(completion_ids=(), loss_mask=(), sampler_logprobs=()), "no token is trained on"),
    ],
)
def test_a_broken_rollout_is_found_among_whole_ones(broken: Rollout, message: str) -> None:
    with pytest.raises(CanaryError, match=rf"(?s)1 of 8 rollouts.*{message}"):
        mask_canary([*SOUND, broken], EOS)


def test_whole_training_samples_pass_and_broken_ones_are_found() -> None:
    sample = strategies.random_samples(0, num_prompts=1, group_size=1)[0]
    whole = torch.ones_like(sample.loss_mask)
    sample = dataclasses.replace(sample, completion_ids=(3,) * len(whole), loss_mask=whole)
    ends = dataclasses.replace(sample, completion_ids=(*sample.completion_ids[:-1], 2))
    sample_canary([sample, ends], EOS)
    masked = ends.loss_mask.clone()
    masked[-1] = False
    masked[0] = len(masked) > 1
    faults = {
        "EOS token is masked out|no token": dataclasses.replace(ends, loss_mask=masked),
        "no token is trained on": dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)),
        "different lengths": dataclasses.replace(sample, old_logprobs=sample.old_logprobs[:-1]),
    }
    for message, broken in faults.items():
        with pytest.raises(CanaryError, match=rf"(?s)1 of 2 training samples.*{message}"):
            sample_canary([sample, broken], EOS)
