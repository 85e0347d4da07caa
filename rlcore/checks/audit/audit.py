"""The audit of a run: recompute sampled rollouts from text to gradient by a slow path, without changing the run.

Every iteration it checks prompts, groups, loss masks, advantages and returns. While it has used less than its fraction
of the run's time, it also checks text, rewards, log-probabilities, values, losses and gradients of a few rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.checks.audit import discrepancies
from rlcore.checks.audit.advantage_tracking import AdvantageTracker
from rlcore.checks.audit.belonging import expected_prompts, group_errors, prompt_errors
from rlcore.checks.audit.draws import DrawAudit, Drawn
from rlcore.checks.audit.finding import Discrepancy
from rlcore.checks.audit.integrity import digest_of_prompts
from rlcore.checks.audit.reference_impl import is_trainable
from rlcore.checks.audit.reward_terms import RewardAudit, known_prompts
from rlcore.checks.audit.standing import next_coefficient, reference_errors, reference_says, standing_errors
from rlcore.checks.canaries import known_answers_canary
from rlcore.errors import CanaryError, CheckpointError, NonFiniteError
from rlcore.seeding import derive_seed, shuffled
from rlcore.training.experience import Experience
from rlcore.training.handover import digest_of
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Prompt, ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from rlcore.loop.run import Components

_OPTIMIZER = "look at the optimizer, and at what sets requires_grad and weights"
Groups = Sequence[Sequence[ScoredRollout]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditedBatch:
    """What was looked at before an update: the rollouts with their samples, and what the policy said of them."""

    items: tuple[ScoredRollout, ...]
    samples: tuple[TrainingSample, ...]
    logprobs: Tensor


class Audit:
    """The audit of one run; ``log`` shows a sentence, ``clock`` gives seconds."""

    def __init__(
        self, parts: Components, log: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._parts, self._log, self._clock, self._config = parts, log, clock, parts.health.audit
        self._began, self._spent, self.num_audited = clock(), 0.0, 0
        self._rewards = RewardAudit(parts.reward, log)
        self._known = known_prompts(parts.reward, parts.prompts)
        first = parts.prompts[:2]
        self._renders = bool(first) and all(self._rendered(p) == p.token_ids for p in first)
        self._tokens, self._direction, self._said = DrawAudit(parts), AdvantageTracker(), set[str]()
        self._anchor: list[float] = []
        self._allowed, self._handed = 0, ""  # rollouts that may be missing; a digest of what is to be learned from
        self._coefficient: float | None = None  # of the KL, where it adapts
        self._prompts = digest_of_prompts(parts.prompts) if self.is_on else ""

    @property
    def is_on(self) -> bool:
        """Whether anything is looked at."""
        return self._config.action != "off"

    def metrics(self) -> dict[str, float]:
        """What it found and what it took, for those who watch: no part of the run's history."""
        if not self.is_on:
            return {}
        figures = {
            "audit/rollouts": float(self.num_audited),
            "audit/time_fraction": self._spent / max(self._clock() - self._began, 1e-9),
            "audit/sampler_log10_evidence": self._tokens.evidence,
        }
        course = self._direction.course
        return figures | ({"audit/advantage_correlation": course.mean} if course else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "sampling": self._tokens.state(),
            "direction": self._direction.values,
            "anchor": self._anchor,
            "prompts": self._prompts,
            "allowed": self._allowed,
            "coefficient": self._coefficient,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`; raise CheckpointError if the prompts have changed since."""
        self._direction = AdvantageTracker()
        self._tokens.restore(state.get("sampling", {}))
        self._allowed, self._coefficient = state.get("allowed", 0), state.get("coefficient")
        if state:
            self._direction.values = list(state["direction"])
            self._anchor = list(state["anchor"])
            if self._prompts and state["prompts"] not in ("", self._prompts):
                raise CheckpointError(
                    "the prompts are not those that the run was interrupted with: other ids, tokens or references",
                    fix="bring back the data that the run began with, or remove its checkpoints to begin anew",
                )

    def allow_missing(self, count: int) -> None:
        """So many rollouts failed, and are in no group."""
        self._allowed += count

    def check_before_update(
        self,
        groups: Groups,
        experience: Experience,
        iteration: int,
        *,
        asked: Sequence[Prompt],
        replaced: Groups,
    ) -> AuditedBatch | None:
        """Look at an iteration before its update; None where nothing has to be looked at after it.

        ``asked``: the prompts that were asked first; ``replaced``: groups that gave way to others.

        Raises:
            CanaryError: something differs from what the second path makes of it; says what, expected, found and where.
        """
        if not self.is_on:
            return None
        with self._timed():
            parts, config = self._parts, self._parts.config
            samples = experience.samples
            self._handed = digest_of(samples)
            for error in standing_errors(parts, iteration, coefficient=self._coefficient):
                self._report(error, iteration)
            self._look_at_groups(groups, asked, iteration)
            in_reward = parts.learner.has_reference and config.kl.apply_to == "reward"
            penalty = parts.learner.kl_coefficient if in_reward else 0.0
            has_tools = parts.sampler is not parts.engine
            found = discrepancies.sample_errors(groups, experience, config, penalty=penalty, has_tools=has_tools)
            for error in found:
                self._report(error, iteration)
            if not self._is_due():
                return None
            kept = [
                item for group in groups for item in group if is_trainable(item, config.update.truncated_completions)
            ]
            places = self._draw(samples, iteration)
            items, chosen = [kept[place] for place in places], [samples[place] for place in places]
            self._ask_rewards(items, [item for group in groups for item in group], iteration)
            drawn = self._tokens.choose(groups, replaced, asked, iteration)
            beyond = [experience.next_values[place] for place in places]
            self._look_twice(items, chosen, beyond, drawn, iteration)
            self._ask_reference(iteration)
            self.num_audited += len(items)
            before, _ = parts.learner.scores([item.rollout for item in items])
            return AuditedBatch(items=tuple(items), samples=tuple(chosen), logprobs=before)

    def check_after_update(
        self,
        looked: AuditedBatch | None,
        stats: UpdateStats,
        samples: Sequence[TrainingSample],
        iteration: int,
        *,
        mean_kl: float,
    ) -> None:
        """Look at what an update did; ``mean_kl``: what the coefficient of the KL is to follow, nats per completion.

        Raises:
            CanaryError: a step was not the optimizer's, weights do not learn, or updates oppose the advantages.
        """
        if not self.is_on:
            return
        learner, config = self._parts.learner, self._parts.config
        with self._timed():
            for error in discrepancies.arrival_errors(stats, self._handed):
                self._report(error, iteration)
            if not stats.skipped:
                now = learner.kl_coefficient
                self._coefficient = next_coefficient(config.kl, now, mean_kl=mean_kl, count=len(samples))
            for sentence in learner.step_errors():
                self._report(Discrepancy(summary=sentence, fix=_OPTIMIZER), iteration)
            for error in discrepancies.update_errors(stats, samples, config, kl=learner.kl_coefficient):
                self._report(error, iteration)
            if looked is not None and stats.moved:
                after, _ = learner.scores([item.rollout for item in looked.items])
                mask = torch.cat([sample.loss_mask for sample in looked.samples])
                advantages = torch.cat([sample.advantages for sample in looked.samples])
                self._direction.see(advantages[mask], (after - looked.logprobs)[mask])
                self._judge_direction(iteration)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - started

    def _is_due(self) -> bool:
        """The first iteration is looked at, and each for which there is time."""
        return not self.num_audited or self._spent <= self._config.max_time_fraction * (self._clock() - self._began)

    def _draw(self, samples: Sequence[TrainingSample], iteration: int) -> list[int]:
        """Places of samples by chance; one of them has an advantage, where any has."""
        order = shuffled(len(samples), self._parts.seed, "audit", iteration)
        chosen = order[: self._config.rollouts]
        if not any(bool(samples[place].advantages.any()) for place in chosen):
            chosen[-1:] = [place for place in order if bool(samples[place].advantages.any())][:1] or chosen[-1:]
        return chosen

    def _ask_rewards(self, items: Sequence[ScoredRollout], everyone: Sequence[ScoredRollout], iteration: int) -> None:
        if self._known:
            known_answers_canary(self._parts.reward, self._known, prefill=self._parts.tokenizer.prefill)
        for item in reversed(items):
            error = self._rewards.error(item, everyone)
            if error:
                what, expected, found = error
                self._report(Discrepancy(summary=what, expected=expected, actual=found, rollout=item), iteration)

    def _look_at_groups(self, groups: Groups, asked: Sequence[Prompt], iteration: int) -> None:
        parts = self._parts
        expected = expected_prompts(
            parts.prompts, parts.mixture_weights, parts.config, seed=parts.seed, iteration=iteration
        )
        for error in prompt_errors(asked, expected):
            self._report(error, iteration)
        for error in group_errors(groups, asked, parts.config, allowed=self._allowed):
            self._report(error, iteration)
        self._allowed = max(0, self._allowed - len(groups) * parts.config.group_size + sum(map(len, groups)))

    def _look_twice(
        self,
        items: Sequence[ScoredRollout],
        samples: Sequence[TrainingSample],
        beyond: Sequence[float],
        drawn: Drawn,
        iteration: int,
    ) -> None:
        """Text, tokens, log-probabilities, values, losses and gradients; and whether tokens are drawn as is said."""
        parts = self._parts
        for item, sample in zip(items, samples, strict=True):
            rendered = self._rendered(item.rollout.prompt) if self._renders else item.rollout.prompt.token_ids
            if error := discrepancies.rollout_error(item, sample, parts.tokenizer, rendered):
                self._report(error, iteration)
        seed = derive_seed(parts.seed, "audit", iteration)
        try:
            rollouts = [item.rollout for _, item in drawn]
            found = parts.learner.examine(samples, rollouts, eos_ids=parts.tokenizer.eos_ids, seed=seed)
        except NonFiniteError as caught:  # the update meets it too, and skips a step or ends the run
            self._say(f"the second pass met no number: {caught.what}")
            return
        if found is None:
            self._say("no memory is left for a second pass: log-probabilities, losses and gradients are not looked at")
            return
        if error := discrepancies.second_pass_error(items, samples, beyond, found, parts):
            self._report(error, iteration)
        if error := self._tokens.bet(drawn, found, iteration):
            self._report(error, iteration)

    def _ask_reference(self, iteration: int) -> None:
        found = reference_says(self._parts)
        self._anchor = self._anchor or found
        for error in reference_errors(self._parts, found, self._anchor if found else []):
            self._report(error, iteration)

    def _judge_direction(self, iteration: int) -> None:
        if self._direction.is_backwards:
            what = f"updates move log-probabilities against the advantages: agreement {self._direction.course}"
            self._report(
                Discrepancy(summary=what, fix="look for a sign that is turned in the loss or in the step"), iteration
            )
        if self._direction.is_unrelated:
            self._say(
                f"updates follow the advantages hardly at all: agreement {self._direction.course}; the KL or the "
                "entropy may outweigh them, or the learning rate is next to 0"
            )

    def _rendered(self, prompt: Prompt) -> tuple[int, ...]:
        render = self._parts.tokenizer.render_prompt
        return render(prompt.messages, tools=prompt.tools) if prompt.messages else ()

    def _report(self, finding: Discrepancy, iteration: int) -> None:
        error = CanaryError(f"the audit of iteration {iteration}: {finding}", where=finding.where, fix=finding.fix)
        if self._config.action == "stop":
            raise error
        self._say(str(error))

    def _say(self, text: str) -> None:
        """A note that is not repeated."""
        kind = text.partition(":")[2][:60]
        if kind not in self._said:
            self._said.add(kind)
            self._log(text)
