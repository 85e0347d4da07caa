"""Choice of rollouts for the sampling test of an iteration, and its result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.checks.audit.features import Features
from rlcore.checks.audit.learner_state import rollout_seed
from rlcore.checks.audit.sampling import SamplingTest
from rlcore.checks.audit.slow_path import MAX_TOKENS, SlowPathResult
from rlcore.sampling.base import replicas_of
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.types import Prompt, Rollout, ScoredRollout

if TYPE_CHECKING:
    from rlcore.loop.components import Components

Groups = Sequence[Sequence[ScoredRollout]]
_TOKENS = 512  # tokens tested per iteration, about
_MAX_ASKED = 4  # times that an agent may ask for a first turn, until it gets the answer that it continues


@dataclass(frozen=True, slots=True)
class CompletionIndex:
    """Index of a completion: of its prompt in the iteration, and of the completion in its group.

    ``num_missing``: failed completions of the group.
    """

    prompt: int
    sample: int
    num_missing: int = field(default=0, compare=False)


class DrawAudit:
    """Sampling test of one run: compare tokens with the distribution that the engine reports."""

    def __init__(self, components: Components) -> None:
        self._components, self._config, self._test = components, components.health.audit, SamplingTest()
        # A ScriptedSampler replays its script and samples nothing.
        engines = replicas_of(components.engine)
        self._is_sampled = not any(isinstance(engine, ScriptedSampler) for engine in engines)
        self._inverts = all(isinstance(engine, NativeSampler) for engine in engines)

    @property
    def evidence(self) -> float:
        """Evidence against the engine: log10 of the mean capital of all bets."""
        return self._test.log_capital / math.log(10.0)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint."""
        return self._test.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state. An empty mapping restarts the test."""
        self._test = SamplingTest()
        if state:
            self._test.restore(state)

    def choose(
        self, groups: Groups, replaced: Groups, scheduled: Sequence[Prompt], iteration: int
    ) -> Sequence[tuple[CompletionIndex, ScoredRollout]]:
        """Return random rollouts with enough tokens: one with the rest of its group first, then others."""
        size = self._components.config.group_size
        everyone = unselected_rollouts(groups, replaced, scheduled, group_size=size) if self._is_sampled else []
        if not everyone:
            return []
        order = shuffled(len(everyone), self._components.seed, "audit", "tokens", iteration)
        first = everyone[order[0]][0].prompt
        order.sort(key=lambda number: everyone[number][0].prompt != first)
        found, count = list[tuple[CompletionIndex, ScoredRollout]](), 0
        for number in order:
            if count >= _TOKENS and len(found) >= self._config.rollouts:
                break
            found.append(everyone[number])
            count += min(MAX_TOKENS, sum(everyone[number][1].rollout.loss_mask))
        return found

    def update(
        self, indexed: Sequence[tuple[CompletionIndex, ScoredRollout]], result: SlowPathResult, iteration: int
    ) -> Discrepancy | None:
        """Test the tokens of these rollouts, and return a discrepancy if the evidence reaches its limit."""
        seed, siblings = derive_seed(self._components.seed, "audit", iteration), dict[int, list[list[int]]]()
        rows = zip(indexed, result.sampled_positions, result.features, strict=True)
        for number, ((index, item), positions, features) in enumerate(rows):
            rollout = item.rollout
            self._test_numbers(index, rollout, positions, features, iteration)
            if rollout.num_sampled is not None:
                continue
            is_whole = len(positions) == sum(rollout.loss_mask)
            tokens = [rollout.completion_ids[each] for each in positions] if is_whole else []
            self._test.update(
                features,
                [rollout.sampler_logprobs[each] for each in positions],
                generator(seed, "places within tokens", number),
                tokens=tokens,
                siblings=siblings.get(index.prompt, ()),
            )
            if is_whole:
                siblings.setdefault(index.prompt, []).append(tokens)
        level = self._config.false_alarm_rate
        return _discrepancy(self._test, level) if self._test.log_capital >= -math.log(level) else None

    def _test_numbers(
        self, index: CompletionIndex, rollout: Rollout, positions: Sequence[int], features: Features, iteration: int
    ) -> None:
        """Test the tokens of the first turn against the random numbers of the seed, if the engine's weights are known.

        An agent selects its calls, but not the tokens of a call.
        """
        learner, end = self._components.learner, rollout.turns[0][1]
        is_whole = len(rollout.tool_calls) + 1 == len(rollout.turns)  # else turns follow each other directly
        kept = [number for number, position in enumerate(positions) if position < end]
        if not (self._inverts and is_whole and kept and rollout.policy_version == learner.policy_version):
            return
        own = Features(**{name: getattr(features, name)[kept] for name in Features.__slots__})
        is_half = min(self._components.engine_dtype.itemsize, learner.facts.compute_dtype.itemsize) < 4
        series = list(possible_numbers(index, rollout, self._components, iteration))
        self._test.bet_on_numbers(own, [positions[number] for number in kept], series, is_half=is_half)


def possible_numbers(
    index: CompletionIndex, rollout: Rollout, components: Components, iteration: int
) -> Iterator[Tensor]:
    """Yield the series of random numbers that the first turn of a completion may have.

    Failed rollouts leave a group, so the number of a sample may be larger by theirs. An agent may have asked before.
    """
    seed = rollout_seed(components.seed, iteration)
    for sample in range(index.sample, index.sample + index.num_missing + 1):
        places = [(index.prompt, sample)]
        if rollout.num_sampled is not None:
            digest = hashlib.sha256(repr(rollout.prompt.token_ids).encode()).hexdigest()
            places = [(derive_seed(index.prompt, sample, digest, count), 0) for count in range(1, _MAX_ASKED + 1)]
        for place in places:
            yield torch.rand(rollout.turns[0][1], generator=generator(seed, *place))


def unselected_rollouts(
    groups: Groups, replaced: Groups, scheduled: Sequence[Prompt], *, group_size: int = 0
) -> list[tuple[CompletionIndex, ScoredRollout]]:
    """Return the rollouts of the scheduled prompts, which do not depend on the sampled tokens.

    The training batch does depend on them if zero-signal groups are replaced or truncated completions are masked.
    """
    waiting = [group for group in (*groups, *replaced) if group]
    found = []
    for index, prompt in enumerate(scheduled):
        group = next((each for each in waiting if each[0].rollout.prompt.prompt_id == prompt.prompt_id), None)
        if group is not None:
            waiting = [each for each in waiting if each is not group]
            missing = max(0, group_size - len(group))
            found += [(CompletionIndex(index, number, missing), item) for number, item in enumerate(group)]
    return found


def _discrepancy(test: SamplingTest, level: float) -> Discrepancy:
    return Discrepancy(
        summary=(
            "tokens are not sampled from the log-probabilities that the engine reports: "
            f"{test.best_bet} ({test.num_tokens} tokens, false alarm rate 1 in {1 / level:.0f} runs)"
        ),
        fix="check the engine's logit processors: temperature, top-k, banned tokens",
    )
