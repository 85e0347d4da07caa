"""Whole iterations, driven by a script: records, training, and everything that ends a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import AuditConfig, CheckpointConfig, HealthConfig, KlConfig, LimitConfig, RewardTerm, SamplingConfig
from rlcore.errors import CanaryError, ConfigError, NonFiniteError, RewardError, StaleSamplerError, TrainingError
from rlcore.loop import Components, HeldOut, finish, iterate, open_run, train, update
from rlcore.loop.prompt_schedule import schedule_of
from rlcore.loop.run import History
from rlcore.loop.update import SAMPLES, SKIPPED, mean_kl, measured_update, save_skipped_batch
from rlcore.metrics import check_names
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.rewards.user_function import FunctionReward, function_reward
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.training.experience import Experience, build_experience
from rlcore.training.local_learner import LocalLearner
from rlcore.training.scoring_models import ScoringModels
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout, TrainingSample
from tests import strategies
from tests.learners import make_learner
from tests.rlcore.loop.conftest import ANSWERS, QUESTIONS, MakeComponents, Tape, right_answers, weights

SCRIPT = dict.fromkeys(QUESTIONS, ANSWERS)


def test_run_records_iterations_and_moves_policy(make_components: MakeComponents) -> None:
    components, tape = make_components(), Tape()
    before = weights(components)
    outcome = train(components, tape)
    assert [row["iteration"] for row in tape.rows] == [1, 2, 3, 4]
    assert [row["policy_version"] for row in outcome.history] == [1, 2, 3, 4]
    assert outcome.stop is None
    assert not torch.equal(before, weights(components))
    assert components.engine.policy_version == components.learner.policy_version == 4
    assert components.engine.differing_parts(components.learner.weights()) == []
    for number, drawn in enumerate(tape.drawn):
        assert [[item.rollout.text for item in group] for group in drawn.groups] == [list(ANSWERS)] * 2
        assert [[item.score.value for item in group] for group in drawn.groups] == [[1.0, 0.0, 0.0]] * 2
        assert {item.rollout.policy_version for group in drawn.groups for item in group} == {number}


def test_run_without_signal_changes_nothing_and_warns(make_components: MakeComponents) -> None:
    components, tape = make_components(script=dict.fromkeys(QUESTIONS, ("wrong",))), Tape()
    before = weights(components)
    outcome = train(components, tape)
    assert torch.equal(before, weights(components)) and not outcome.took_steps
    assert [row["groups/zero_signal"] for row in outcome.history] == [1.0] * 4
    assert components.learner.policy_version == 4
    assert tape.notes[-1].startswith("health alarm: the policy did not change: no iteration took an optimizer step")
    assert sum("health alarm: rewards are constant at 0: no answer is right (zero_signal" in n for n in tape.notes) == 1


def test_metrics_are_in_glossary_and_history(make_components: MakeComponents) -> None:
    config = {
        "sampling": SamplingConfig(max_new_tokens=6, dynamic_sampling_rounds=1),
        "eval_every": 2,
        "algorithm": "dapo",
    }
    components = make_components(config=config | {"kl": KlConfig(coefficient=0.1)})
    held_out = HeldOut(prompts=components.prompts[:3], verifier=math_verifier())
    data = {"prompts": components.prompts[3:], "held_out": held_out}
    components, tape = make_components(config=config | {"kl": KlConfig(coefficient=0.1)}, **data), Tape()
    outcome = train(components, tape)
    for recorded, kept in zip(tape.rows, outcome.history, strict=True):
        watched = {name: value for name, value in recorded.items() if name.startswith(("health/", "audit/", "checks/"))}
        assert recorded == kept | watched
        check_names({name: value for name, value in recorded.items() if name != "iteration"})
        assert recorded["audit/time_fraction"] < recorded["checks/time_fraction"] < 1.0
    assert ["eval/accuracy" in row for row in tape.rows] == [False, True, False, True]
    assert "memory/total_bytes" in tape.rows[0]
    assert not any("memory/total_bytes" in row for row in tape.rows[1:])


def math_verifier() -> Any:
    return build_rewards((RewardTerm(kind="math"),), resources=RewardResources())


def test_datasets_are_mixed_by_weight_with_own_rewards(make_components: MakeComponents) -> None:
    plain = make_components()
    prompts = [replace(each, dataset="a" if place < 3 else "b") for place, each in enumerate(plain.prompts)]
    paid = WeightedReward([WeightedTerm(FunctionReward(right_answers, "right"), 1.0, data=("b",))])
    free = WeightedReward([*paid.terms, WeightedTerm(FunctionReward(nothing, "nothing"), 1.0, data=("a",))])
    held_out = HeldOut(prompts=[prompts[0], prompts[5]], verifier=free)
    mix = {"prompts": prompts[1:5], "mixture_weights": {"a": 1.0, "b": 1.0}, "reward": free, "held_out": held_out}
    tape = Tape()
    train(make_components(config={"eval_every": 4}, **mix), tape)
    for drawn in tape.drawn:
        assert sorted(group[0].rollout.prompt.dataset for group in drawn.groups) == ["a", "b"]
    assert [row["reward/data/a"] for row in tape.rows] == [0.0] * 4
    assert [row["reward/data/b"] for row in tape.rows] == [pytest.approx(1 / 3)] * 4
    assert {"eval/data/a", "eval/data/b"} <= set(tape.rows[-1])
    assert [row["reward/term_unscored/right"] for row in tape.rows] == [0.0] * 4
    check_names({name: value for name, value in tape.rows[-1].items() if name != "iteration"})


def nothing(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    return [0.0 for _ in rollouts]


def test_failed_rollouts_are_not_trained(make_components: MakeComponents) -> None:
    failing = set(list(QUESTIONS)[:2])
    script = {question: ANSWERS for question in QUESTIONS if question not in failing}
    components, tape = make_components(script=script, config={"num_iterations": 3}), Tape()
    train(components, tape)  # three iterations of two prompts: each prompt once
    trained = [item.rollout.prompt.prompt_id for drawn in tape.drawn for group in drawn.groups for item in group]
    assert sorted(set(trained)) == sorted(set(QUESTIONS) - failing)
    assert sum(row["rollouts/count"] for row in tape.rows) == 3 * (6 - 2)
    failures = [int(note.split("=")[1].split(",")[0]) for note in tape.notes if "rollouts: failed" in note]
    assert sum(failures) == 3 * 2


def test_iteration_of_failed_rollouts_ends_run(make_components: MakeComponents) -> None:
    first = schedule_of(make_components()).prompts_for(1)
    script = {question: ANSWERS for question in QUESTIONS if question not in {p.prompt_id for p in first}}
    components = make_components(script=script)
    before = weights(components)
    with pytest.raises(
        TrainingError, match="none of the iteration's rollouts can be trained on: the engine completed none"
    ):
        train(components, Tape())
    assert torch.equal(before, weights(components))


def test_failing_grader_ends_run(make_components: MakeComponents) -> None:
    def judge(rollouts: Sequence[Rollout]) -> list[Any]:
        return [None if rollout.text == "no" else 1.0 for rollout in rollouts]

    with pytest.raises(RewardError, match="2 of 6 rollouts could not be scored"):
        train(make_components(reward=function_reward(judge)), Tape())


def test_reward_in_wrong_order_ends_run(make_components: MakeComponents) -> None:
    def backwards(rollouts: Sequence[Rollout]) -> list[Any]:
        return [float(sum(map(ord, rollout.prompt.prompt_id))) for rollout in reversed(rollouts)]

    components, tape = make_components(reward=function_reward(backwards)), Tape()
    before = weights(components)
    with pytest.raises(CanaryError, match="not in the order of the rollouts"):
        train(components, tape)
    assert tape.rows == []
    assert torch.equal(before, weights(components))


def test_dynamic_sampling_trains_fresh_groups(make_components: MakeComponents) -> None:
    solved = {p.prompt_id for p in schedule_of(make_components()).prompts_for(1)[:1]}
    script = {question: ["right"] if question in solved else ANSWERS for question in QUESTIONS}
    config = {"algorithm": "dapo", "sampling": SamplingConfig(max_new_tokens=6, dynamic_sampling_rounds=2)}
    tape = Tape()
    train(make_components(script=script, config=config), tape)
    assert [group[0].rollout.prompt.prompt_id for group in tape.drawn[0].replaced] == list(solved)
    assert tape.rows[0]["groups/replaced"] == 1.0
    for drawn in tape.drawn:
        assert len(drawn.groups) == 2
        assert not solved & {item.rollout.prompt.prompt_id for group in drawn.groups for item in group}


@pytest.mark.parametrize(("staleness", "versions"), [(1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])])
def test_staleness_is_exact(staleness: int, versions: list[int], make_components: MakeComponents) -> None:
    config = {"num_iterations": 5, "sampling": SamplingConfig(max_new_tokens=6, staleness=staleness)}
    warn = HealthConfig(action="warn")  # a script's policy moves far in each step
    components, tape = make_components(config=config, health=warn), Tape()
    train(components, tape)
    sampled = [{item.rollout.policy_version for group in drawn.groups for item in group} for drawn in tape.drawn]
    assert sampled == [{version} for version in versions]
    assert [row["staleness"] for row in tape.rows] == [float(n - version) for n, version in enumerate(versions)]
    met = [place for place, row in enumerate(tape.rows) if "sync/log_odds_mean_diff" in row]
    assert met == ([0, 1, 2, 3, 4] if staleness == 1 else [4])
    assert components.engine.policy_version == 5
    prompts = [[group[0].rollout.prompt.prompt_id for group in drawn.groups] for drawn in tape.drawn]
    turns = schedule_of(components)
    assert prompts == [[p.prompt_id for p in turns.prompts_for(n)] for n in range(1, 6)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_engine_that_ignores_weights_ends_run(staleness: int, make_components: MakeComponents) -> None:
    class Deaf(NativeSampler):
        def load_weights(self, state: Any, *, policy_version: int) -> None:
            self.policy_version = policy_version

    config = {"num_iterations": 6, "sampling": SamplingConfig(max_new_tokens=6, staleness=staleness)}
    components = make_components()
    scorer = Deaf(components.learner.learner.policy, components.tokenizer)
    engine = ScriptedSampler.from_texts(SCRIPT, components.tokenizer, scorer=scorer)
    with pytest.raises(StaleSamplerError, match="the engine's weights are not the learner's"):
        train(make_components(engine=engine, sampler=engine, config=config), Tape())


class TurnsWrong(NativeSampler):
    """Reports other log-probabilities, or an older version, from some version on."""

    since, shift, lag = 0, 0.0, 0

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        found = super().logprobs(prompt_ids, completion_ids, temperature=temperature)
        return [value - self.shift * (self.policy_version >= self.since) for value in found]


class Lags(ScriptedSampler):
    def sample(self, *given: Any, **more: Any) -> Any:
        groups = super().sample(*given, **more)
        lag = self._scorer.lag * (self.policy_version >= self._scorer.since)  # type: ignore[union-attr]
        return [[replace(each, policy_version=each.policy_version - lag) for each in group] for group in groups]


@pytest.mark.parametrize(
    ("since", "iterations", "answers"), [(0, 0, ANSWERS), (1, 0, ("right",)), (2, 2, ("right",)), (3, 3, ANSWERS)]
)
@pytest.mark.parametrize(("shift", "lag", "error"), [(0.01, 0, CanaryError), (0.0, 1, StaleSamplerError)])
def test_wrong_engine_ends_run_before_it_is_recorded(
    shift: float,
    lag: int,
    error: type[Exception],
    since: int,
    iterations: int,
    answers: Sequence[str],
    make_components: MakeComponents,
) -> None:
    """From the second sync on no probe is sampled: the iteration's own rollouts show it before it is recorded."""
    components, unaudited = make_components(), HealthConfig(audit=AuditConfig(action="off"))
    scorer = TurnsWrong(components.learner.learner.policy, components.tokenizer)
    scorer.since, scorer.shift, scorer.lag = since, shift, lag
    engine = Lags.from_texts(dict.fromkeys(QUESTIONS, answers), components.tokenizer, scorer=scorer)
    tape = Tape()
    with pytest.raises(error, match=r"differ from the learner's by 0\.01|the engine serves policy version"):
        train(make_components(engine=engine, sampler=engine, health=unaudited), tape)
    assert len(tape.rows) == iterations


def test_probes_are_sampled_at_start_and_resume(make_components: MakeComponents) -> None:
    class Counts(ScriptedSampler):
        probes = 0

        def sample(self, prompts: Any, params: Any, **more: Any) -> Any:
            self.probes += params.num_samples < 3  # a group is of three
            return super().sample(prompts, params, **more)

    plain = make_components()
    scorers = (NativeSampler(plain.learner.learner.policy, plain.tokenizer) for _ in range(2))
    engine, again = (Counts.from_texts(SCRIPT, plain.tokenizer, scorer=scorer) for scorer in scorers)
    tape, config = Tape(), {"num_iterations": 4}
    with open_run(make_components(engine=engine, sampler=engine, config=config), tape) as run:
        for _ in range(2):
            iterate(run)
            assert engine.probes == 2
    assert all(0.0 <= row["sync/logprob_max_diff"] < 1e-4 for row in tape.rows)
    train(make_components(engine=again, sampler=again, config=config), tape)
    assert (again.probes, len(tape.rows)) == (2, 4)


def test_masked_eos_ends_run_before_update(make_components: MakeComponents, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_end(sample: TrainingSample) -> TrainingSample:
        mask = sample.loss_mask.clone()
        mask[-1] = False
        return replace(sample, loss_mask=mask)

    def build(*arguments: Any, **settings: Any) -> Experience:  # no rollout that is whole itself makes such a sample
        made = build_experience(*arguments, **settings)
        return replace(made, samples=[without_end(sample) for sample in made.samples])

    components = make_components()
    before = weights(components)
    monkeypatch.setattr(update, "build_experience", build)
    with pytest.raises(CanaryError, match="the EOS token is masked out of the loss"):
        train(components, Tape())
    assert torch.equal(weights(components), before)


def test_evaluation_needs_held_out_problems(make_components: MakeComponents) -> None:
    with pytest.raises(ConfigError, match="held-out"):
        train(make_components(config={"eval_every": 1}), Tape())


def test_run_without_recorder_is_logged(make_components: MakeComponents, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="rlcore"):
        train(make_components(config={"num_iterations": 2}))
    lines = [record.getMessage()[:13] for record in caplog.records]
    assert [line for line in lines if line.startswith("iteration")] == ["iteration 1/2", "iteration 2/2"]


KL = {"kl": KlConfig(coefficient=1e-6), "num_iterations": 6, "checkpoints": CheckpointConfig(every_iterations=3)}


def kl_limit(history: Sequence[Any], iteration: int) -> HealthConfig:
    """Stops at the first reading above that of the iteration before ``iteration``."""
    before, then = (history[place]["kl/ref"] for place in (iteration - 2, iteration - 1))
    assert before < then
    bound = (before + then) / 2.0
    any_mismatch = LimitConfig(warn=98.0, stop=99.0)
    return HealthConfig(kl=LimitConfig(warn=bound * 0.99, stop=bound, patience=1), mismatch=any_mismatch)


def course_of(components: Components) -> tuple[list[torch.Tensor], Sequence[Mapping[str, float]]]:
    """The weights before the first iteration and after each, and the metrics of each."""
    with open_run(components, Tape()) as run:
        course = [weights(components)]
        while not run.is_over:
            iterate(run)
            course.append(weights(components))
        return course, finish(run).history


def test_health_stop_restores_last_healthy_iteration(make_components: MakeComponents) -> None:
    free = make_components(config=KL, folder="free", health=HealthConfig(action="warn"))
    course, history = course_of(free)
    stopping, tape = make_components(config=KL, health=kl_limit(history, 5)), Tape()
    outcome = train(stopping, tape)
    # The reading of iteration 4, the last within the bound, is of rollouts that the weights of iteration 3 sampled.
    assert outcome.stop is not None and (outcome.stop.iteration, outcome.stop.restored_iteration) == (5, 3)
    assert tape.stops == [outcome.stop]
    assert torch.equal(weights(stopping), course[3])
    assert [row["iteration"] for row in outcome.history] == [1, 2, 3]
    assert [row["iteration"] for row in outcome.rolled_back_history] == [4, 5]
    assert [finding["level"] for finding in outcome.findings] == ["stop"]
    assert stopping.engine.policy_version == 3


@pytest.mark.parametrize("staleness", [0, 2])
def test_health_stop_replays_from_checkpoint(staleness: Any, make_components: MakeComponents) -> None:
    config = KL | {
        "checkpoints": CheckpointConfig(every_iterations=100),  # after the first and the last alone
        "sampling": SamplingConfig(max_new_tokens=6, staleness=staleness),
    }
    free = make_components(config=config, folder="free", health=HealthConfig(action="warn"))
    course, history = course_of(free)
    stopping, tape = make_components(config=config, health=kl_limit(history, 6)), Tape()
    outcome = train(stopping, tape)
    assert outcome.stop is not None and outcome.stop.restored_iteration == 4 - staleness
    assert torch.equal(weights(stopping), course[outcome.stop.restored_iteration])
    assert any("from_checkpoint=1 " in note for note in tape.notes)


def test_run_unhealthy_from_start_has_no_result(make_components: MakeComponents) -> None:
    health = HealthConfig(kl=LimitConfig(warn=-2.0, stop=-1.0, patience=1))
    with pytest.raises(TrainingError, match="no healthy checkpoint exists"):
        train(make_components(config=KL, health=health), Tape())


def test_warning_rule_ends_no_run(make_components: MakeComponents) -> None:
    health = HealthConfig(action="warn", kl=LimitConfig(warn=-2.0, stop=-1.0, patience=1))
    tape = Tape()
    outcome = train(make_components(config=KL, health=health), tape)
    assert (outcome.stop, len(outcome.history)) == (None, 6)
    assert [row["health/alarms"] for row in tape.rows] == [1.0] * 6
    assert sum("health stop: kl" in note for note in tape.notes) == 1  # once, not after every iteration


UNAUDITED = HealthConfig(audit=AuditConfig(action="off"))  # which would find the gradient first, where it looks


def overflowing(learner: LocalLearner, versions: set[int]) -> None:
    """Give a learner gradients of infinity in the updates that begin with one of these versions."""
    parameter = next(learner.learner.policy.parameters())
    parameter.register_hook(lambda gradient: gradient * (math.inf if learner.policy_version in versions else 1.0))


def test_skipped_batch_is_kept_once_as_json_without_nan(tmp_path: Path) -> None:
    samples = strategies.random_samples(0)
    nan = torch.full_like(samples[0].ref_logprobs, float("nan"))
    samples[0] = replace(samples[0], ref_logprobs=nan)
    kept = save_skipped_batch(tmp_path, 7, samples, ["the gradient norm is inf"])
    assert save_skipped_batch(tmp_path, 7, [], []) == kept == tmp_path / SKIPPED / "iteration-00007"
    text = (kept / SAMPLES).read_text()
    found = json.loads(text)
    assert "NaN" not in text and set(found["samples"][0]["ref_logprobs"]) == {None}
    assert found["errors"] == ["the gradient norm is inf"]
    assert [row["completion_ids"] for row in found["samples"]] == [list(sample.completion_ids) for sample in samples]
    assert found["samples"][0]["advantages"] == samples[0].advantages.tolist()


def test_skipped_step_is_counted_and_kept(make_components: MakeComponents, tmp_path: Path) -> None:
    components, tape = make_components(health=UNAUDITED), Tape()
    overflowing(components.learner, {1})
    with open_run(components, tape) as run:
        iterate(run)
        before = weights(components)
        iterate(run)
        assert torch.equal(weights(components), before)
        iterate(run)
        assert not torch.equal(weights(components), before)
    assert [row.get("update/skipped_steps") for row in tape.rows] == [None, 1.0, None]
    assert len(json.loads((tmp_path / "run" / SKIPPED / "iteration-00002" / SAMPLES).read_text())["samples"]) == 6
    assert any("the gradient norm is" in note and SKIPPED in note for note in tape.notes)


def test_run_ends_after_too_many_skipped_steps(make_components: MakeComponents, tmp_path: Path) -> None:
    first = make_components(health=UNAUDITED)
    overflowing(first.learner, {1, 2, 3})
    with pytest.raises(NonFiniteError, match="the gradient norm is"):
        train(first, Tape())
    again, tape = make_components(health=UNAUDITED), Tape()
    overflowing(again.learner, {1, 2, 3})
    with pytest.raises(NonFiniteError):
        train(again, tape)
    assert (tmp_path / "run" / SKIPPED / "iteration-00004" / SAMPLES).is_file()  # of the step that ended it too
    assert tape.rows == []  # two were skipped before the kill; the third is still one too many


SOME_SAMPLES = strategies.random_samples(0)
WITHOUT_SIGNAL = [replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in SOME_SAMPLES]


def run_to_measure(name: str = "grpo") -> Any:
    learner = make_learner(name, dtype=torch.float32)
    components = SimpleNamespace(
        learner=LocalLearner(learner),
        engine_dtype=torch.float32,
        config=learner.config,
        prompts=[SimpleNamespace(token_ids=(1, 2, 3))],
    )
    return SimpleNamespace(components=components, history=History(Path("nowhere")))


def size_of(run: Any) -> int:
    return run.components.learner.facts.num_parameters


def measured_iteration(run: Any, samples: list[TrainingSample]) -> dict[str, float]:
    """One iteration's memory metrics, kept in the history as a run keeps them."""
    stats, metrics = measured_update(run, samples, seed=len(run.history))
    assert isinstance(stats, UpdateStats)
    run.history.append({"iteration": len(run.history) + 1, **metrics})
    return dict(metrics)


def test_first_moving_update_is_measured() -> None:
    run = run_to_measure()
    assert measured_iteration(run, WITHOUT_SIGNAL) == {}
    metrics = measured_iteration(run, SOME_SAMPLES)
    size = size_of(run)
    assert metrics["memory/gradients_bytes"] == 4 * size
    assert metrics["memory/optimizer_bytes"] >= 8 * size  # two moments
    assert metrics["memory/activations_bytes"] > 0
    assert measured_iteration(run, SOME_SAMPLES) == {}


def test_update_of_critic_alone_is_not_measured() -> None:
    run = run_to_measure("ppo")
    assert measured_iteration(run, WITHOUT_SIGNAL) == {}
    both = size_of(run) + sum(p.numel() for p in run.components.learner.learner.critic.parameters())
    assert measured_iteration(run, SOME_SAMPLES)["memory/gradients_bytes"] == 4 * both


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_mean_kl_is_nats_per_completion(placement: Any) -> None:
    policy, reference = strategies.tiny_llama(), strategies.tiny_llama(seed=9)
    groups = strategies.random_groups(policy, 3)
    kl = KlConfig(coefficient=0.1, apply_to=placement)
    judges = ScoringModels(policy=policy, reference=reference, critic=None, temperature=1.0, tokens_per_microbatch=64)
    experience = build_experience(
        groups, ALGORITHMS["grpo"], judges, kl=kl, kl_coefficient=0.1, truncated="score", need_old_logprobs=False
    )
    items = [item.rollout for group in groups for item in group]
    gaps = []
    for sample, rollout in zip(experience.samples, items, strict=True):
        old = rollout.sampler_logprobs  # the engine's are the policy's own here
        gaps.append([a - float(b) for a, b in zip(old, sample.ref_logprobs, strict=True)])
    if placement == "reward":
        expected = sum(map(sum, gaps)) / len(gaps)
        assert mean_kl(experience, {}) == pytest.approx(expected, rel=1e-4)
        return
    k3 = [math.exp(-gap) + gap - 1.0 for row in gaps for gap in row]
    per_token = sum(k3) / len(k3)
    assert mean_kl(experience, {"kl/ref": per_token}) == pytest.approx(sum(k3) / len(gaps), rel=1e-6)


FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("engine", "learner", "expected"),
    [(FLOAT, BRAIN, BRAIN), (BRAIN, FLOAT, BRAIN), (HALF, BRAIN, BRAIN), (FLOAT, HALF, HALF)],
)
def test_the_coarser_precision_is_that_of_engine_or_learner(
    engine: torch.dtype, learner: torch.dtype, expected: torch.dtype, make_components: MakeComponents
) -> None:
    made = SimpleNamespace(facts=SimpleNamespace(compute_dtype=learner))
    assert make_components(engine_dtype=engine, learner=made).coarser_dtype == expected
