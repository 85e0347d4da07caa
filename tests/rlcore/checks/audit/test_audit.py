"""The audit of a run: what it finds ends the run, what it costs has a budget, and it changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.algorithms.kl import PenaltyController
from rlcore.checks.audit import audit as audit_module
from rlcore.checks.audit.audit import TimeBudget
from rlcore.config import (
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    HealthConfig,
    KlConfig,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.errors import CanaryError, CheckpointError, StorageError
from rlcore.loop import Components, TrainResult, train, update
from rlcore.models.files import is_unchanged
from rlcore.models.integrity import digest_of_prompts, verify_model, verify_restored, verify_saved, write_model_digest
from rlcore.models.loading import load_policy, save_model
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.user_function import function_reward
from rlcore.sampling import native
from rlcore.training import checkpoint, learner
from rlcore.training.experience import Experience, build_experience
from rlcore.training.learner import Learner
from rlcore.types import Rollout
from tests.rlcore.loop.conftest import QUESTIONS, KilledError, MakeComponents, Tape, weights
from tests.rlcore.loop.test_resume import without_costs

ALWAYS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0))

WARNS = HealthConfig(audit=AuditConfig(max_time_fraction=1.0, action="warn"))

OFF = HealthConfig(audit=AuditConfig(action="off"))


def vowels(rollouts: Sequence[Rollout]) -> list[Any]:
    return [float(sum(letter in "aeiou" for letter in rollout.text)) for rollout in rollouts]


def drawn_components(make: MakeComponents, num_iterations: int = 12, **changes: Any) -> Components:
    config = {"num_iterations": num_iterations, "checkpoints": CheckpointConfig(every_iterations=1000)}
    components = make(config=config, **changes)
    engine = components.engine._scorer
    return dataclasses.replace(components, engine=engine, sampler=engine, reward=function_reward(vowels))


def outcome_of(components: Components) -> tuple[TrainResult, Tape]:
    tape = Tape()
    return train(components, tape), tape


def test_a_run_with_the_audit_is_the_run_without_it_bit_for_bit(make_components: MakeComponents) -> None:
    config = {"algorithm": "ppo", "kl": KlConfig(coefficient=0.1, apply_to="reward")}
    runs = [make_components(config=config, health=health, folder=str(n)) for n, health in enumerate((ALWAYS, OFF))]
    (with_it, tape), (without, _) = map(outcome_of, runs)
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert without_costs(with_it) == without_costs(without)
    assert tape.rows[-1]["audit/rollouts"] == 8.0


def test_the_first_iteration_is_audited_and_the_others_while_the_budget_lasts(make_components: MakeComponents) -> None:
    never = HealthConfig(audit=AuditConfig(max_time_fraction=0.0))
    _, tape = outcome_of(make_components(health=never, config={"checkpoints": CheckpointConfig(every_iterations=1000)}))
    assert [row["audit/rollouts"] for row in tape.rows] == [2.0] * 4


def test_rewards_that_were_turned_on_their_way_end_the_run_with_both_values(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(self: WeightedReward, rollouts: Sequence[Rollout]) -> Any:
        return [dataclasses.replace(score, value=-(score.value or 0.0)) for score in scored(self, rollouts)]

    scored = WeightedReward.__call__
    components = make_components(health=ALWAYS, script={question: ["right", "no"] for question in QUESTIONS})
    monkeypatch.setattr(WeightedReward, "__call__", turned)
    with pytest.raises(CanaryError, match=r"the sum of the reward terms: expected 1, found -1") as caught:
        train(components, Tape())
    assert "rollout of prompt" in caught.value.where
    assert "audit of iteration" in caught.value.what


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_advantages_of_the_wrong_sign_end_the_run_before_a_weight_moves_or_are_noted_once(
    action: Any, make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
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
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = native.sample_tokens

    def sharper(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        tokens, _ = draw(logits, uniforms, temperature=0.4 * temperature)
        return tokens, (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    monkeypatch.setattr(native, "sample_tokens", sharper)
    audit = AuditConfig(max_time_fraction=1.0, rollouts=6)
    components = drawn_components(make_components, health=HealthConfig(action="off", audit=audit))
    components.learner.learner.policy.get_input_embeddings().weight.data.mul_(6.0)
    components.engine.load_weights(components.learner.weights(), policy_version=0)
    with pytest.raises(CanaryError, match="not sampled from the log-probabilities that the engine reports"):
        train(components, Tape())


def test_a_correct_engine_has_no_finding(make_components: MakeComponents) -> None:
    _, tape = outcome_of(drawn_components(make_components, 6, health=ALWAYS))
    assert max(row["audit/sampler_log10_evidence"] for row in tape.rows) < 2.0
    assert tape.rows[-1]["audit/rollouts"] == 12.0


def test_a_reference_that_is_another_after_a_resume_is_found(make_components: MakeComponents) -> None:
    config = {"kl": KlConfig(coefficient=0.1), "sampling": SamplingConfig(max_new_tokens=6)}
    with pytest.raises(KilledError):
        train(make_components(config=config, health=ALWAYS), Tape(killed_in=3))
    again = make_components(config=config, health=ALWAYS)
    again.learner.reference.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(CanaryError, match="reference"):
        train(again, Tape())


def test_a_coefficient_of_the_kl_that_is_not_the_configured_one_is_found(make_components: MakeComponents) -> None:
    components = make_components(config={"kl": KlConfig(coefficient=0.1)})
    components.learner.learner.kl = dataclasses.replace(components.learner.learner.kl, coefficient=0.9)
    with pytest.raises(CanaryError, match=r"the coefficient of the KL: expected 0\.1, found 0\.9"):
        train(components, Tape())


PENALTY = {"algorithm": "ppo_penalty", "update": UpdateConfig(num_epochs=2)}


def test_a_penalty_that_adapts_is_left_alone_also_after_a_resume(make_components: MakeComponents) -> None:
    with pytest.raises(KilledError):
        train(make_components(config=PENALTY, health=ALWAYS), Tape(killed_in=3))
    _, tape = outcome_of(make_components(config=PENALTY, health=ALWAYS))
    assert [row["iteration"] for row in tape.rows] == [3, 4]
    assert tape.rows[-1]["kl/penalty_coefficient"] != 1.0


def test_a_penalty_that_a_resumed_run_forgets_is_found(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
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
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PenaltyController, "updated", lambda self, measured: self)
    with pytest.raises(CanaryError, match=r"iteration 2: the coefficient of the penalty: expected .*, found 1"):
        train(make_components(config=PENALTY), Tape())


@pytest.mark.parametrize("placement", ["separate", "shared"])
def test_a_critic_that_warms_up_alone_is_left_alone(make_components: MakeComponents, placement: Any) -> None:
    critic = CriticConfig(learning_rate=1e-3, warmup_iterations=2, architecture=placement)
    _, tape = outcome_of(make_components(health=ALWAYS, config={"algorithm": "ppo", "critic": critic}))
    assert [row["gradient_norm"] > 0.0 for row in tape.rows] == [False, False, True, True]


def test_an_update_that_was_counted_and_not_done_ends_the_run(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "_step", lambda self, samples, totals: totals)
    with pytest.raises(CanaryError, match=r"the training samples of epoch 1 are not the \d+ audited ones"):
        train(make_components(health=ALWAYS), Tape())


def test_micro_batches_that_were_lost_end_the_run(
    make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = learner.pack_for
    monkeypatch.setattr(learner, "pack_for", lambda *given, **more: packed(*given, **more)[:1])
    small = UpdateConfig(tokens_per_microbatch=32)
    with pytest.raises(CanaryError, match="loss/policy of a few samples: expected"):
        train(make_components(health=ALWAYS, config={"update": small}), Tape())


def test_a_resumed_audit_keeps_its_statistics(make_components: MakeComponents) -> None:
    components = make_components()
    audit = audit_module.Audit(components, print)
    audit._ref_logprobs = [-1.0]
    again = audit_module.Audit(components, print)
    again.restore(audit.state())
    assert again.state() == audit.state()
    again.restore({})
    assert again.state()["sampling"]["num_tokens"] == 0


def test_prompts_that_are_not_rendered_by_the_template_are_taken_as_they_are(make_components: MakeComponents) -> None:
    own = [dataclasses.replace(prompt, token_ids=prompt.token_ids[1:]) for prompt in make_components().prompts]
    train(make_components(prompts=own, health=ALWAYS, config={"num_iterations": 2}), Tape())


def audited_iterations(cost: float, *, max_fraction: float, count: int = 200) -> tuple[list[int], float]:
    """Return the audited ones of ``count`` iterations of 10 s, and the fraction of audits of ``cost`` seconds."""
    now, audited = [0.0], list[int]()
    budget = TimeBudget(max_fraction, lambda: now[0])
    for iteration in range(1, count + 1):
        now[0] += 10.0
        budget.begin()
        if not audited or budget.has_room():
            with budget.counted():
                now[0] += cost
            budget.end()
            audited.append(iteration)
    return audited, budget.fraction


def test_an_audit_waits_until_its_cost_fits() -> None:
    """2 s of 10 s: the second fits when 4 s are 2 % of the time, 200 s, of which 2 s are the second's own."""
    audited, fraction = audited_iterations(2.0, max_fraction=0.02)
    assert audited[:2] == [1, 20]
    assert 0.018 < fraction <= 0.02
    assert audited_iterations(2.0, max_fraction=0.0, count=20)[0] == [1]
    assert audited_iterations(50.0, max_fraction=1.0, count=20)[0] == list(range(1, 21))


def test_a_check_that_fails_is_counted() -> None:
    now = [0.0]
    budget = TimeBudget(0.02, lambda: now[0])
    with suppress(ValueError), budget.counted():
        now[0] += 3.0
        raise ValueError
    assert budget.seconds == 3.0


CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


def test_weights_that_were_saved_are_those_in_memory_also_when_they_were_rounded(start: Path, tmp_path: Path) -> None:
    model = load_policy(start, **CPU)
    save_model(model, start, tmp_path / "model")
    verify_saved(model.state_dict(), tmp_path / "model")
    half = {name: value.to(torch.bfloat16) for name, value in load_file(tmp_path / "model/model.safetensors").items()}
    save_file(half, tmp_path / "model/model.safetensors")
    verify_saved(model.state_dict(), tmp_path / "model")
    model.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(StorageError, match=r"1 of \d+ saved tensors differ from the trained ones"):
        verify_saved(model.state_dict(), tmp_path / "model")


def test_training_that_ends_with_the_weights_of_its_start_is_known_in_any_precision(
    start: Path, tmp_path: Path
) -> None:
    model = load_policy(start, **CPU)
    model.to(torch.bfloat16)
    for name in ("start", "same", "wide", "other"):
        save_model(model, start, tmp_path / name / "model")
        model.to(torch.float32 if name == "same" else model.dtype)
        model.get_input_embeddings().weight.data.mul_(1.5 if name == "wide" else 1.0)
    before = {"start": None, **dict.fromkeys(("same", "wide", "other"), tmp_path / "start" / "model")}
    found = {
        name: write_model_digest(tmp_path / name, stage=name, model=tmp_path / name / "model", start=path)
        for name, path in before.items()
    }
    assert found == {"start": False, "same": True, "wide": True, "other": False}
    assert {name: is_unchanged(tmp_path / name) for name in (*found, "no artifact")} == found | {"no artifact": False}
    verify_model(tmp_path / "same", stage="same", model=tmp_path / "same" / "model")


def test_a_learner_that_saves_the_start_in_place_of_itself_is_found(
    make_components: MakeComponents, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = make_components(config={"num_iterations": 1})
    train(components, Tape())
    components.learner.save_model(start, tmp_path / "trained")
    first = load_policy(start, **CPU)
    monkeypatch.setattr("rlcore.models.runtime.save_model", lambda policy, *rest, **more: save_model(first, *rest))
    with pytest.raises(StorageError, match="differ from the trained ones"):
        components.learner.save_model(start, tmp_path / "again")


@pytest.mark.parametrize("lost", ["_restore_weights", "_restore_optimizer"])
def test_a_resume_that_restores_only_a_part_is_stopped_before_its_first_step(
    lost: str, make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=3))
    monkeypatch.setattr(checkpoint, lost, lambda *_: None)
    tape = Tape()
    with pytest.raises(CheckpointError, match="differ from the checkpoint after it was restored"):
        train(make_components(), tape)
    assert tape.rows == []


def test_a_tensor_that_is_missing_on_either_side_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "policy.safetensors")
    verify_restored({"policy": {"a": torch.ones(2)}}, tmp_path)
    with pytest.raises(CheckpointError, match="1 of 1 tensors of policy"):
        verify_restored({"policy": {"a": torch.ones(2), "b": torch.ones(1)}}, tmp_path)


def test_a_model_is_taken_up_as_what_it_was_sealed_as(start: Path, tmp_path: Path) -> None:
    model = load_policy(start, **CPU)
    save_model(model, start, tmp_path / "model")
    with pytest.raises(StorageError, match="digests of the model are unreadable"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    write_model_digest(tmp_path, stage="grpo", model=tmp_path / "model")
    verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    with pytest.raises(StorageError, match="stage is 'ppo'"):
        verify_model(tmp_path, stage="ppo", model=tmp_path / "model")
    template = tmp_path / "model/chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    template.write_text("Sir: " + text, encoding="utf-8")
    with pytest.raises(StorageError, match="tokenizer or chat template is"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")
    template.write_text(text, encoding="utf-8")
    model.get_input_embeddings().weight.data.mul_(1.5)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(StorageError, match="weights is"):
        verify_model(tmp_path, stage="grpo", model=tmp_path / "model")


def test_prompts_have_a_digest_of_ids_tokens_references_and_order(make_components: MakeComponents) -> None:
    prompts = list(make_components().prompts)
    assert digest_of_prompts(prompts) != digest_of_prompts(prompts[::-1])
    assert digest_of_prompts(prompts) == digest_of_prompts(tuple(prompts))
