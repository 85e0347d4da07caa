"""The audit of a run: each iteration, some rollouts are followed from text to gradient by a second, slow path.

    every iteration    which tokens train, why a completion ended, advantages and returns
    while it is cheap  text, rewards, log-probabilities, reference, values, losses and gradients of a few rollouts;
                       after the update, whether log-probabilities moved with the advantages

Cheap means: the audit has taken less than its share of the run's time so far. The clock decides what is looked at,
never what a run computes: draws are the audit's own, and the models and rewards that it asks are left as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.audit.compare import Finding, experience_faults, rollout_fault, second_pass_fault, update_faults
from rlcore.audit.direction import Direction
from rlcore.audit.plain import usable
from rlcore.audit.rewards import RewardAudit
from rlcore.audit.sampling import SamplingTest
from rlcore.audit.seals import digest_of_prompts
from rlcore.canaries import known_answers_canary
from rlcore.canaries.known_answers import prompts_for
from rlcore.canaries.rewards import VERIFIERS
from rlcore.errors import CanaryError, CheckpointError, NonFiniteError
from rlcore.packing import TokenSequence
from rlcore.sampling.base import members_of
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.training.totals import UpdateStats
from rlcore.types import Prompt, ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from rlcore.loop.run import Parts

Groups = Sequence[Sequence[ScoredRollout]]
_PROBE = 16  # tokens on which the reference is asked again
_MOVED = 1e-3, 0.25  # nats; of the reference in float32, in half precision
_RESUMED = "what a checkpoint restores is not what the run goes on with; start the same command again"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Looked:
    """What was looked at before an update: the rollouts with their samples, and what the policy said of them."""

    items: tuple[ScoredRollout, ...]
    samples: tuple[TrainingSample, ...]
    logprobs: Tensor


class Audit:
    """The audit of one run; ``note`` shows a sentence, ``clock`` gives seconds."""

    def __init__(
        self, parts: Parts, note: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._parts, self._note, self._clock, self._config = parts, note, clock, parts.health.audit
        self._began, self._spent, self.num_looked = clock(), 0.0, 0
        self._rewards = RewardAudit(parts.reward, note)
        self._known = list(
            dict.fromkeys(
                prompt
                for part in parts.reward.parts
                if part.reward.name in VERIFIERS
                for prompt in prompts_for(part.reward.name, [p for p in parts.prompts if part.is_on(p)])
            )
        )
        first = parts.prompts[:2]
        self._renders = bool(first) and all(self._rendered(p) == p.token_ids for p in first)
        # A script replays what it was given: nothing is drawn.
        self._draws = not any(isinstance(engine, ScriptedSampler) for engine in members_of(parts.engine))
        self._sampling, self._direction, self._said = SamplingTest(), Direction(), set[str]()
        self._anchor: list[float] = []
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
            "audit/rollouts": float(self.num_looked),
            "audit/share": self._spent / max(self._clock() - self._began, 1e-9),
            "audit/sampling": self._sampling.log_capital / math.log(10.0),
        }
        course = self._direction.course
        return figures | ({"audit/direction": course.mean} if course else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        kept = {"direction": self._direction.values, "anchor": self._anchor, "prompts": self._prompts}
        return {"sampling": self._sampling.state(), **kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave; nothing begins anew with the first iteration.

        Raises:
            CheckpointError: the prompts are others than when the checkpoint was written.
        """
        self._sampling, self._direction = SamplingTest(), Direction()
        if state:
            self._sampling.restore(state["sampling"])
            self._direction.values = list(state["direction"])
            self._anchor = list(state["anchor"])
            if self._prompts and state["prompts"] not in ("", self._prompts):
                raise CheckpointError(
                    "the prompts are not those that the run was interrupted with: other ids, tokens or references",
                    fix="bring back the data that the run began with, or remove its checkpoints to begin anew",
                )

    def before(self, groups: Groups, samples: Sequence[TrainingSample], iteration: int) -> Looked | None:
        """Look at an iteration before its update; None where nothing has to be looked at after it.

        Raises:
            CanaryError: something differs from what the second path makes of it; says what, expected, found and where.
        """
        if not self.is_on:
            return None
        with self._timed():
            parts, config = self._parts, self._parts.config
            for fault in _place_faults(parts, iteration):
                self._report(fault, iteration)
            in_reward = parts.learner.has_reference and config.kl.placement == "reward"
            penalty = parts.learner.kl_coefficient if in_reward else 0.0
            has_tools = parts.sampler is not parts.engine
            for fault in experience_faults(groups, samples, config, penalty=penalty, has_tools=has_tools):
                self._report(fault, iteration)
            if not self._is_due():
                return None
            kept = [item for group in groups for item in group if usable(item, config.update.truncated)]
            places = self._draw(samples, iteration)
            items, chosen = [kept[place] for place in places], [samples[place] for place in places]
            self._ask_rewards(items, [item for group in groups for item in group], iteration)
            self._look_twice(items, chosen, iteration)
            self._ask_reference(iteration)
            self.num_looked += len(items)
            before, _ = parts.learner.scores([item.rollout for item in items])
            return Looked(items=tuple(items), samples=tuple(chosen), logprobs=before)

    def after(
        self, looked: Looked | None, stats: UpdateStats, samples: Sequence[TrainingSample], iteration: int
    ) -> None:
        """Look at what an update did.

        Raises:
            CanaryError: a step was not the optimizer's, weights do not learn, or updates oppose the advantages.
        """
        if not self.is_on:
            return
        with self._timed():
            for sentence in self._parts.learner.step_faults():
                self._report(
                    Finding(what=sentence, fix="look at the optimizer and at what sets requires_grad"), iteration
                )
            for fault in update_faults(stats, samples, self._parts.config, kl=self._parts.learner.kl_coefficient):
                self._report(fault, iteration)
            if looked is not None and stats.moved:
                after, _ = self._parts.learner.scores([item.rollout for item in looked.items])
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
        return not self.num_looked or self._spent <= self._config.share * (self._clock() - self._began)

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
            fault = self._rewards.fault(item, everyone)
            if fault:
                what, expected, found = fault
                self._report(Finding(what=what, expected=expected, found=found, item=item), iteration)

    def _look_twice(self, items: Sequence[ScoredRollout], samples: Sequence[TrainingSample], iteration: int) -> None:
        """Text, tokens, log-probabilities, values, losses and gradients; and whether tokens are drawn as is said."""
        parts = self._parts
        for item, sample in zip(items, samples, strict=True):
            prompt = item.rollout.prompt
            rendered = self._rendered(prompt) if self._renders else prompt.token_ids
            if fault := rollout_fault(item, sample, parts.tokenizer, rendered):
                self._report(fault, iteration)
        seed = derive_seed(parts.seed, "audit", iteration)
        try:
            found = parts.learner.examine(samples, eos_ids=parts.tokenizer.eos_ids, seed=seed)
        except NonFiniteError as error:  # the update meets it too, and skips a step or ends the run
            self._say(f"the second pass met no number: {error.what}")
            return
        if found is None:
            self._say("no memory is left for a second pass: log-probabilities, losses and gradients are not looked at")
            return
        if fault := second_pass_fault(items, samples, found, parts):
            self._report(fault, iteration)
        if not self._draws:
            return
        for number, (sample, places, features) in enumerate(zip(samples, found.places, found.features, strict=True)):
            reported = sample.sampler_logprobs[list(places)].tolist()
            self._sampling.see(features, reported, generator(seed, "places within tokens", number))
        level = self._config.false_alarms
        if self._sampling.log_capital >= -math.log(level):
            self._report(_misdrawn(self._sampling, level), iteration)

    def _ask_reference(self, iteration: int) -> None:
        """The reference says of the same few tokens what it said at the start, or when the run was interrupted."""
        learner, prompts = self._parts.learner, self._parts.prompts
        if not learner.has_reference:
            return
        probe = TokenSequence(prompt_ids=prompts[0].token_ids[:_PROBE], completion_ids=prompts[-1].token_ids[:_PROBE])
        found = learner.passes([probe], needs_policy=False, cut=()).ref[0].tolist()
        self._anchor = self._anchor or found
        moved = max(abs(one - other) for one, other in zip(found, self._anchor, strict=True))
        if not moved <= _MOVED[learner.facts.compute_dtype.itemsize < 4]:
            what = f"the reference has moved: it says {moved:.3g} nats else of a text than at the start"
            self._report(
                Finding(what=what, fix="the reference is frozen, and is the run's start after a resume too"), iteration
            )

    def _judge_direction(self, iteration: int) -> None:
        if self._direction.is_backwards:
            what = f"updates move log-probabilities against the advantages: agreement {self._direction.course}"
            self._report(Finding(what=what, fix="look for a sign that is turned in the loss or in the step"), iteration)
        if self._direction.is_unrelated:
            self._say(
                f"updates follow the advantages hardly at all: agreement {self._direction.course}; the KL or the "
                "entropy may outweigh them, or the learning rate is next to 0"
            )

    def _rendered(self, prompt: Prompt) -> tuple[int, ...]:
        render = self._parts.tokenizer.render_prompt
        return render(prompt.messages, tools=prompt.tools) if prompt.messages else ()

    def _report(self, finding: Finding, iteration: int) -> None:
        error = CanaryError(f"the audit of iteration {iteration}: {finding}", where=finding.where, fix=finding.fix)
        if self._config.action == "stop":
            raise error
        self._say(str(error))

    def _say(self, text: str) -> None:
        """A note that is not repeated."""
        kind = text.partition(":")[2][:60]
        if kind not in self._said:
            self._said.add(kind)
            self._note(text)


def _place_faults(parts: Parts, iteration: int) -> Iterator[Finding]:
    """Whether the learner stands where the run does."""
    learner, kl = parts.learner, parts.config.kl
    if learner.policy_version != iteration - 1:
        expected, found = f"{iteration - 1} updates", str(learner.policy_version)
        yield Finding(what="where the learner stands", expected=expected, found=found, fix=_RESUMED)
    if not kl.target and learner.kl_coefficient != kl.coefficient:  # a controller's may be any
        expected, found = f"{kl.coefficient:g}", f"{learner.kl_coefficient:g}"
        yield Finding(what="the coefficient of the KL", expected=expected, found=found, fix=_RESUMED)


def _misdrawn(test: SamplingTest, level: float) -> Finding:
    return Finding(
        what=(
            "tokens are not drawn from the log-probabilities that the engine reports: over "
            f"{test.num_tokens} tokens the bet that {test.best_bet} has won what chance gives once in {1 / level:.0f}"
        ),
        fix="compare what the engine does to its logits before it draws with what it reports: temperature, top-k, bans",
    )
