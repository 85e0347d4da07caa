"""The audit of a run, which it does not change.

Every iteration it checks prompts, groups, loss masks, advantages and returns. While it has used less than its fraction
of the run's time, it also checks text, rewards, log-probabilities, values, losses and gradients of a few rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from rlcore.checks.audit import Discrepancy, comparison, learner_state, prompt_checks
from rlcore.checks.audit.draws import CompletionIndex, DrawAudit
from rlcore.checks.audit.prompt_checks import choose_episodes, is_agents
from rlcore.checks.audit.reward_terms import Answers, EvaluationAudit, RewardAudit, known_prompts
from rlcore.checks.canaries.rewards import known_answers_canary
from rlcore.errors import CanaryError, CheckpointError, NonFiniteError
from rlcore.models.integrity import digest_of_prompts
from rlcore.seeding import derive_seed
from rlcore.training.audit.loss_formula import kl_sums
from rlcore.training.audit.reference_impl import samples_of, trainable
from rlcore.training.experience import Experience
from rlcore.training.minibatches import digest
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Prompt, Rollout, Score, ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from rlcore.components import Components

_OPTIMIZER = "check the optimizer, and code that sets requires_grad or weights"
Groups = Sequence[Sequence[ScoredRollout]]


class Audit:
    """The audit of one run. ``log`` shows a sentence."""

    def __init__(self, components: Components, log: Callable[[str], None]) -> None:
        self._components, self._log, self._config = components, log, components.health.audit
        self._budget, self.num_audited = TimeBudget(self._config.max_time_fraction), 0
        self._rewards = RewardAudit(components.reward, log)
        self._known = known_prompts(components.reward, components.prompts)
        first = components.prompts[:2]
        self._renders = bool(first) and all(self._rendered(p) == p.token_ids for p in first)
        self._draws, self._logged = DrawAudit(components), set[str]()
        self._rows = {prompt.prompt_id: prompt for prompt in components.prompts}
        held_out = components.held_out
        self._evaluations = EvaluationAudit(components, held_out, log) if held_out else None
        self._ref_logprobs: list[float] = []  # at the start of the run
        self._num_missing, self._digests = 0, list[tuple[int, str]]()  # failed rollouts that may be missing; samples
        self._iteration = 0
        self._audited: tuple[Rollout, ...] = ()  # samples of this iteration, if it is audited
        self._coefficient: float | None = None  # of an adaptive KL
        self._penalty = learner_state.first_penalty(components.config)  # None: unknown
        self._prompts = digest_of_prompts(components.prompts) if self.is_on else ""

    @property
    def is_on(self) -> bool:
        return self._config.action != "off"

    def metrics(self) -> dict[str, float]:
        """Return results and cost of the audit. They are not part of the run's history."""
        if not self.is_on:
            return {}
        return {
            "audit/rollouts": float(self.num_audited),
            "audit/time_fraction": self._budget.fraction,
            "audit/sampler_log10_evidence": self._draws.evidence,
        }

    @property
    def seconds(self) -> float:
        return self._budget.seconds

    def state(self) -> dict[str, Any]:
        return {
            "sampling": self._draws.state(),
            "ref_logprobs": self._ref_logprobs,
            "prompts": self._prompts,
            "num_missing": self._num_missing,
            "coefficient": self._coefficient,
            "penalty": self._penalty,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise CheckpointError if the prompts have changed since."""
        self._draws.restore(state.get("sampling", {}))
        self._num_missing, self._coefficient = state.get("num_missing", 0), state.get("coefficient")
        if state:
            self._penalty = state.get("penalty")
            if not state["prompts"]:  # the audit was off until now
                self._coefficient = self._components.learner.kl_coefficient
                self._penalty = None
            self._ref_logprobs = list(state["ref_logprobs"])
            if self._prompts and state["prompts"] not in ("", self._prompts):
                raise CheckpointError(
                    "the prompts differ from those of the checkpoint: other ids, tokens or reference answers",
                    fix="restore the data of the run, or delete its checkpoints to restart it",
                )

    def allow_missing(self, count: int) -> None:
        """Allow ``count`` more rollouts to be missing, because they failed."""
        self._num_missing += count

    def check_seed(self, seed: int, *purpose: int) -> None:
        """Check the seed of rollouts; ``purpose``: iteration, and round of dynamic sampling."""
        if self.is_on and seed != (right := learner_state.rollout_seed(self._components.seed, *purpose)):
            fix = "every iteration, and round of dynamic sampling, has its own"
            self._report([Discrepancy("the seed of the rollouts", right, seed, fix=fix)], purpose[0])

    def check_before_update(
        self,
        groups: Groups,
        experience: Experience,
        iteration: int,
        *,
        scheduled: Sequence[Prompt],
        replaced: Groups,
    ) -> None:
        """Audit an iteration before its update.

        ``scheduled``: prompts of the iteration, before dynamic sampling; ``replaced``: groups that it replaced.

        Raises:
            CanaryError: A discrepancy to the slow path, with the expected and the actual value.
        """
        if not self.is_on:
            return
        self._budget.begin()
        self._iteration = iteration
        with self._budget.counted():
            components, config = self._components, self._components.config
            samples, self._audited = experience.samples, ()
            self._digests = [(sample.group, digest(sample)) for sample in samples]
            self._report(learner_state.learner_state_errors(components, iteration, coefficient=self._coefficient))
            self._check_groups(groups, replaced, scheduled, iteration)
            in_reward = components.learner.has_reference and config.kl.apply_to == "reward"
            penalty = components.learner.kl_coefficient if in_reward else 0.0
            has_tools = components.sampler is not components.engine
            self._report(comparison.sample_errors(groups, experience, config, penalty=penalty, has_tools=has_tools))
            self._report(comparison.metric_errors(groups, experience, config))
            if self.num_audited and not self._budget.has_room():
                return
            kept = [item for _, item in trainable(groups, config)]
            parts = [(item, part) for item in kept for part in samples_of(item)]
            if len(parts) != len(samples):  # reported above, where a discrepancy only warns
                return
            chosen = choose_episodes(samples, self._config.rollouts, seed=components.seed, iteration=iteration)
            self._check_rewards([parts[own[0]][0] for own in chosen], list(chain(*groups)))
            indices = list(chain(*chosen))
            items, trained = [parts[index][1] for index in indices], [samples[index] for index in indices]
            rollouts = self._draws.choose(groups, replaced, scheduled, iteration)
            next_values = [experience.next_values[index] for index in indices]
            self._check_slow_path(items, trained, next_values, rollouts, iteration, by_agents=is_agents(kept))
            self._check_reference()
            self.num_audited += len(chosen)
            self._audited = tuple(part.rollout for _, part in parts)

    def check_after_update(
        self, stats: UpdateStats, samples: Sequence[TrainingSample], iteration: int, *, mean_kl: float
    ) -> None:
        """Audit an update; ``mean_kl``: measured KL that the coefficient follows, nats per episode.

        Raises:
            CanaryError: A step differs from the optimizer's, weights do not train, or a control has a wrong number.
        """
        if not self.is_on:
            return
        learner, config = self._components.learner, self._components.config
        with self._budget.counted():
            seed = derive_seed(self._components.seed, "update", iteration)
            self._report(learner_state.arrival_errors(stats, self._digests, config.update, seed=seed))
            self._report(learner_state.epoch_errors(stats, config.update))
            if not stats.skipped:
                now, count = learner.kl_coefficient, len({sample.episode for sample in samples})
                own = learner_state.mean_kl(samples, stats.metrics, config) if learner.has_reference else 0.0
                self._report(learner_state.measure_error("the KL to the reference policy", mean_kl, own))
                self._coefficient = learner_state.next_coefficient(config.kl, now, mean_kl=mean_kl, count=count)
            self._report(learner_state.penalty_errors(stats.metrics, self._penalty))
            self._penalty = learner_state.next_penalty(config, stats.metrics)
            self._report([Discrepancy(error, fix=_OPTIMIZER) for error in learner.step_errors()])
            self._report(comparison.update_errors(stats, samples, config, kl=learner.kl_coefficient))
            self._check_moved(stats, samples)
        if self._audited:
            self._budget.end()

    def check_evaluation(self, groups: Answers, scores: Sequence[Score], metrics: Mapping[str, float]) -> None:
        """Audit an evaluation on the held-out problems: its answers, their scores, and the metrics.

        Raises:
            CanaryError: The accuracy is not that of the answers, or a chosen answer has another text, score or tokens.
        """
        if self.is_on and self._evaluations is not None:
            has_room = self._budget.has_room()
            with self._budget.counted():
                self._report(self._evaluations.errors(groups, scores, metrics, has_room=has_room))

    def _check_moved(self, stats: UpdateStats, samples: Sequence[TrainingSample]) -> None:
        learner = self._components.learner
        if not self._audited or "kl/after_update" not in stats.metrics:
            return
        after, _ = learner.scores(self._audited)
        old, mask = (torch.cat([getattr(each, name) for each in samples]) for name in ("old_logprobs", "loss_mask"))
        count, total, _ = kl_sums(after, old, after, mask)
        tolerance = 2e-3 if learner.facts.compute_dtype.itemsize < 4 else 1e-4
        found, own = stats.metrics["kl/after_update"], float(total / count)
        name = "the KL after the update, which the penalty follows"
        self._report(learner_state.measure_error(name, found, own, tolerance=tolerance))

    def _check_rewards(self, items: Sequence[ScoredRollout], batch: Sequence[ScoredRollout]) -> None:
        if self._known:
            known_answers_canary(self._components.reward, self._known, prefill=self._components.tokenizer.prefill)
        for item in reversed(items):
            if error := self._rewards.error(item, batch):
                self._report([Discrepancy(*error, rollout=item)])

    def _check_groups(self, groups: Groups, replaced: Groups, scheduled: Sequence[Prompt], iteration: int) -> None:
        components = self._components
        expected = prompt_checks.expected_prompts(
            components.prompts, components.mixture_weights, components.config, seed=components.seed, iteration=iteration
        )
        self._report(prompt_checks.prompt_errors(scheduled, expected))
        missing = len(groups) * components.config.group_size - sum(map(len, groups))
        self._report(prompt_checks.group_errors(groups, scheduled, components.config, num_missing=self._num_missing))
        self._num_missing = max(0, self._num_missing - missing)
        self._report(prompt_checks.row_errors(groups, self._rows))
        staleness = components.config.sampling.staleness
        self._report(prompt_checks.version_errors(groups, iteration, staleness=staleness))
        self._report(prompt_checks.replacement_errors(components, groups, replaced, scheduled, iteration=iteration))

    def _check_slow_path(
        self,
        items: Sequence[ScoredRollout],
        samples: Sequence[TrainingSample],
        next_values: Sequence[float],
        indexed: Sequence[tuple[CompletionIndex, ScoredRollout]],
        iteration: int,
        *,
        by_agents: bool,
    ) -> None:
        components = self._components
        for item, sample in zip(items, samples, strict=True):
            prompt = item.rollout.prompt
            rendered = None if by_agents else self._rendered(prompt) if self._renders else prompt.token_ids
            if error := comparison.rollout_error(item, sample, components.tokenizer, rendered):
                self._report([error])
        seed = derive_seed(components.seed, "audit", iteration)
        try:
            rollouts = [item.rollout for _, item in indexed]
            result = components.learner.run_slow_path(
                samples, rollouts, eos_ids=components.tokenizer.eos_ids, seed=seed
            )
        except NonFiniteError as caught:  # the update meets it too, and skips a step or ends the run
            self._log_once(f"slow path skipped, NaN or infinity: {caught.what}")
            return
        if result is None:
            self._log_once("slow path skipped, out of memory: log-probabilities, losses and gradients are not audited")
            return
        if error := comparison.slow_path_error(items, samples, next_values, result, components):
            self._report([error])
        if error := self._draws.update(indexed, result, iteration):
            self._report([error])

    def _check_reference(self) -> None:
        found = learner_state.reference_logprobs(self._components)
        self._ref_logprobs = self._ref_logprobs or found
        self._report(learner_state.reference_errors(self._components, found, self._ref_logprobs if found else []))

    def _rendered(self, prompt: Prompt) -> tuple[int, ...]:
        render = self._components.tokenizer.render_prompt
        return render(prompt.messages, tools=prompt.tools) if prompt.messages else ()

    def _report(self, discrepancies: Iterable[Discrepancy], iteration: int = 0) -> None:
        for each in discrepancies:
            error = CanaryError(
                f"the audit of iteration {iteration or self._iteration}: {each}", where=each.where, fix=each.fix
            )
            if self._config.action == "stop":
                raise error
            self._log_once(str(error))

    def _log_once(self, text: str) -> None:
        kind = text.partition(":")[2][:60]
        if kind not in self._logged:
            self._logged.add(kind)
            self._log(text)


class TimeBudget:
    """Seconds of the audit of one run, at most a fraction of the run's; ``clock`` returns seconds."""

    def __init__(self, max_fraction: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_fraction, self._clock = max_fraction, clock
        self._began, self.seconds = clock(), 0.0
        self._before = self._cost = 0.0  # seconds before the current iteration; seconds of the newest audited one

    @property
    def fraction(self) -> float:
        return self.seconds / max(self._clock() - self._began, 1e-9)

    @contextmanager
    def counted(self) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - started

    def begin(self) -> None:
        self._before = self.seconds

    def end(self) -> None:
        self._cost = self.seconds - self._before

    def has_room(self) -> bool:
        """Return True if another audited iteration of the same cost stays within the fraction."""
        elapsed = self._clock() - self._began
        return self.seconds + self._cost <= self._max_fraction * (elapsed + self._cost)
