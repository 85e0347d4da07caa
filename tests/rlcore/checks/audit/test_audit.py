"""The audit in whole runs: what it stops, what it costs, and that it changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import PenaltyController
from rlcore.checks.audit import audit as audit_module
from rlcore.config import (
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    HealthConfig,
    KlConfig,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.errors import CanaryError
from rlcore.loop import Components, TrainResult, train, update
from rlcore.loop.native import chat_prompts, native_components
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.user_function import function_reward
from rlcore.sampling import native
from rlcore.training import checkpoint, learner
from rlcore.training.experience import Experience, build_experience
from rlcore.training.learner import Learner
from rlcore.types import Rollout
from tests import strategies
from tests.rlcore.loop.conftest import QUESTIONS, KilledError, MakeComponents, Tape, make_components, start, weights  # noqa: F401
from tests.rlcore.loop.test_resume import without_costs

ALWAYS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0))
WARNS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0, action="warn"))
OFF = HealthConfig(audit=AuditConfig(action="off"))


def vowels(rollouts: Sequence[Rollout]) -> list[Any]:
    return [float(sum(letter in "aeiou" for letter in rollout.text)) for rollout in rollouts]


def drawn_components(make: MakeComponents, **changes: Any) -> Components:
    """Parts whose completions are drawn by the native engine, and not a script's."""
    components = make(config={"num_iterations": 12, "checkpoints": CheckpointConfig(every_iterations=1000)}, **changes)
    engine = components.engine._scorer
    return dataclasses.replace(components, engine=engine, sampler=engine, reward=function_reward(vowels))


def outcome_of(components: Components) -> tuple[TrainResult, Tape]:
    tape = Tape()
    return train(components, tape), tape


def test_a_run_with_the_audit_is_the_run_without_it_bit_for_bit(make_components: MakeComponents) -> None:  # noqa: F811
    config = {"algorithm": "ppo", "kl": KlConfig(coefficient=0.1, apply_to="reward")}
    runs = [make_components(config=config, health=health, folder=str(n)) for n, health in enumerate((ALWAYS, OFF))]
    (with_it, tape), (without, _) = map(outcome_of, runs)
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert without_costs(with_it) == without_costs(without)
    assert tape.rows[-1]["audit/rollouts"] == 8.0


def test_the_first_iteration_is_looked_at_and_the_others_while_there_is_time(make_components: MakeComponents) -> None:  # noqa: F811
    never = HealthConfig(audit=AuditConfig(max_time_fraction=0.0))
    _, tape = outcome_of(make_components(health=never, config={"checkpoints": CheckpointConfig(every_iterations=1000)}))
    assert [row["audit/rollouts"] for row in tape.rows] == [2.0] * 4


def test_rewards_that_were_turned_on_their_way_end_the_run_with_both_values(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turned(self: WeightedReward, rollouts: Sequence[Rollout]) -> Any:
        return [dataclasses.replace(score, value=-(score.value or 0.0)) for score in scored(self, rollouts)]

    scored = WeightedReward.__call__
    components, tape = (
        make_components(health=ALWAYS, script={question: ["right", "no"] for question in QUESTIONS}),
        Tape(),
    )
    monkeypatch.setattr(WeightedReward, "__call__", turned)
    with pytest.raises(CanaryError, match=r"the sum of the reward terms: expected 1, found -1") as caught:
        train(components, tape)
    assert "rollout of prompt" in caught.value.where
    assert "audit of iteration" in caught.value.what


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_advantages_of_the_wrong_sign_end_the_run_before_a_weight_moves_or_are_noted_once(
    action: Any,
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def negated(*arguments: Any, **settings: Any) -> Experience:
        made = build_experience(*arguments, **settings)
        turned = tuple(dataclasses.replace(each, advantages=-each.advantages) for each in made.samples)
        return dataclasses.replace(made, samples=turned)

    monkeypatch.setattr(update, "build_experience", negated)
    components, tape = make_components(health=ALWAYS if action == "stop" else WARNS), Tape()
    before = weights(components)
    if action == "stop":
        with pytest.raises(CanaryError, match=r"the advantage of token 1 of 6: expected 1\.41421, found -1\.41421"):
            train(components, tape)
        assert torch.equal(before, weights(components))
        return
    train(components, tape)
    assert len([note for note in tape.notes if "the advantage of token" in note]) == 1


def test_an_engine_that_draws_at_another_temperature_than_it_reports_is_found(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = native.sample_tokens

    def sharper(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        tokens, _ = draw(logits, uniforms, temperature=0.4 * temperature)
        return tokens, (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    monkeypatch.setattr(native, "sample_tokens", sharper)
    components = drawn_components(
        make_components, health=HealthConfig(action="off", audit=AuditConfig(max_time_fraction=1.0, rollouts=6))
    )
    components.learner.learner.policy.get_input_embeddings().weight.data.mul_(6.0)
    components.engine.load_weights(components.learner.weights(), policy_version=0)
    with pytest.raises(CanaryError, match="not sampled from the log-probabilities that the engine reports"):
        train(components, Tape())


def test_a_sound_engine_is_left_alone(make_components: MakeComponents) -> None:  # noqa: F811
    _, tape = outcome_of(drawn_components(make_components, health=ALWAYS))
    assert max(row["audit/sampler_log10_evidence"] for row in tape.rows) < 2.0
    assert tape.rows[-1]["audit/rollouts"] == 24.0


def test_a_reference_that_is_another_after_a_resume_is_found(make_components: MakeComponents) -> None:  # noqa: F811
    config = {"kl": KlConfig(coefficient=0.1), "sampling": SamplingConfig(max_new_tokens=6)}
    with pytest.raises(KilledError):
        train(make_components(config=config, health=ALWAYS), Tape(killed_in=3))
    again = make_components(config=config, health=ALWAYS)
    again.learner.reference.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(CanaryError, match="reference"):
        train(again, Tape())


def test_a_coefficient_of_the_kl_that_is_not_the_configured_one_is_found(make_components: MakeComponents) -> None:  # noqa: F811
    components = make_components(config={"kl": KlConfig(coefficient=0.1)})
    components.learner.learner.kl = dataclasses.replace(components.learner.learner.kl, coefficient=0.9)
    with pytest.raises(CanaryError, match=r"the coefficient of the KL: expected 0\.1, found 0\.9"):
        train(components, Tape())


PENALTY = {"algorithm": "ppo_penalty", "update": UpdateConfig(num_epochs=2)}


def test_a_penalty_that_adapts_is_left_alone_also_after_a_resume(make_components: MakeComponents) -> None:  # noqa: F811
    with pytest.raises(KilledError):
        train(make_components(config=PENALTY, health=ALWAYS), Tape(killed_in=3))
    _, tape = outcome_of(make_components(config=PENALTY, health=ALWAYS))
    assert [row["iteration"] for row in tape.rows] == [3, 4]
    assert tape.rows[-1]["kl/penalty_coefficient"] != 1.0


def test_a_penalty_that_a_resumed_run_forgets_is_found(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KilledError):
        train(make_components(config=PENALTY), Tape(killed_in=3))
    restore = checkpoint._restore
    monkeypatch.setattr(
        checkpoint, "_restore", lambda folder, into, found: restore(folder, into, {**found, "penalty_coefficient": 0.9})
    )
    with pytest.raises(CanaryError, match=r"the coefficient of the penalty: expected .*, found 0\.9"):
        train(make_components(config=PENALTY), Tape())


def test_a_penalty_that_does_not_adapt_is_found(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PenaltyController, "updated", lambda self, measured: self)
    with pytest.raises(CanaryError, match=r"iteration 2: the coefficient of the penalty: expected .*, found 1"):
        train(make_components(config=PENALTY), Tape())


@pytest.mark.parametrize("placement", ["separate", "shared"])
def test_a_critic_that_warms_up_alone_is_left_alone(make_components: MakeComponents, placement: Any) -> None:  # noqa: F811
    critic = CriticConfig(learning_rate=1e-3, warmup_iterations=2, architecture=placement)
    _, tape = outcome_of(make_components(health=ALWAYS, config={"algorithm": "ppo", "critic": critic}))
    assert [row["gradient_norm"] > 0.0 for row in tape.rows] == [False, False, True, True]


def test_an_update_that_was_counted_and_not_done_ends_the_run(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Learner, "_step", lambda self, samples, totals: totals)
    with pytest.raises(CanaryError, match=r"the training samples of epoch 1 are not the \d+ audited ones"):
        train(make_components(health=ALWAYS), Tape())


def test_micro_batches_that_were_lost_end_the_run(
    make_components: MakeComponents,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = learner.pack_for
    monkeypatch.setattr(learner, "pack_for", lambda *given, **more: packed(*given, **more)[:1])
    small = UpdateConfig(tokens_per_microbatch=32)
    with pytest.raises(CanaryError, match="loss/policy of a few samples: expected"):
        train(make_components(health=ALWAYS, config={"update": small}), Tape())


def test_an_audit_that_goes_on_from_its_state_keeps_what_it_has_seen(make_components: MakeComponents) -> None:  # noqa: F811
    components = make_components()
    audit = audit_module.Audit(components, print)
    audit._ref_logprobs = [-1.0]
    again = audit_module.Audit(components, print)
    again.restore(audit.state())
    assert again.state() == audit.state()
    again.restore({})
    assert again.state()["sampling"]["num_tokens"] == 0


def test_prompts_that_are_not_rendered_by_the_template_are_taken_as_they_are(start: Any, tmp_path: Any) -> None:  # noqa: F811
    from rlcore.text.tokenization import ChatTokenizer

    prompts = chat_prompts(ChatTokenizer.load(start), QUESTIONS)
    own = [dataclasses.replace(prompt, token_ids=prompt.token_ids[1:]) for prompt in prompts]
    config = strategies.rl_config(num_iterations=2, sampling=SamplingConfig(max_new_tokens=6))
    components = native_components(start, config, prompts=own, reward=function_reward(vowels), folder=tmp_path / "run")
    train(dataclasses.replace(components, health=ALWAYS), Tape())
