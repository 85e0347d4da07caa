"""Choice of rollouts for the sampling test of an iteration, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.checks.audit.episode_checks import is_agents
from rlcore.checks.audit.sampling import CompletionIndex, SamplingTest
from rlcore.checks.audit.slow_path import MAX_TOKENS, SlowPathResult
from rlcore.sampling.base import replicas_of
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.types import Prompt, ScoredRollout

if TYPE_CHECKING:
    from rlcore.loop.components import Components

Groups = Sequence[Sequence[ScoredRollout]]
IndexedRollouts = Sequence[tuple[CompletionIndex, ScoredRollout]]
_TOKENS = 512  # tokens tested per iteration, about


class DrawAudit:
    """Sampling test of one run: compare tokens with the distribution that the engine reports."""

    def __init__(self, components: Components) -> None:
        self._components, self._config, self._test = components, components.health.audit, SamplingTest()
        # A ScriptedSampler replays its script and samples nothing.
        self._is_sampled = not any(isinstance(engine, ScriptedSampler) for engine in replicas_of(components.engine))

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

    def choose(self, groups: Groups, replaced: Groups, scheduled: Sequence[Prompt], iteration: int) -> IndexedRollouts:
        """Return random rollouts with enough tokens: one with the rest of its group first, then others."""
        everyone = unselected_rollouts(groups, replaced, scheduled) if self._is_sampled else []
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

    def update(self, indexed: IndexedRollouts, result: SlowPathResult, iteration: int) -> Discrepancy | None:
        """Test the tokens of these rollouts, and return a discrepancy if the evidence reaches its limit."""
        seed, siblings = derive_seed(self._components.seed, "audit", iteration), dict[int, list[list[int]]]()
        rows = zip(indexed, result.sampled_positions, result.features, strict=True)
        for number, ((index, item), positions, features) in enumerate(rows):
            rollout = item.rollout
            is_whole = len(positions) == sum(rollout.loss_mask)
            tokens = [rollout.completion_ids[each] for each in positions] if is_whole else []
            self._test.update(
                features,
                [rollout.sampler_logprobs[each] for each in positions],
                generator(seed, "places within tokens", number),
                tokens=tokens,
                index=index if is_whole else None,
                siblings=siblings.get(index.prompt, ()),
            )
            if is_whole:
                siblings.setdefault(index.prompt, []).append(tokens)
        level = self._config.false_alarm_rate
        return _discrepancy(self._test, level) if self._test.log_capital >= -math.log(level) else None


def unselected_rollouts(
    groups: Groups, replaced: Groups, scheduled: Sequence[Prompt]
) -> list[tuple[CompletionIndex, ScoredRollout]]:
    """Return the rollouts of the scheduled prompts, which do not depend on the sampled tokens.

    The training batch does depend on them if zero-signal groups are replaced or truncated completions are masked. So do
    the tokens of an agent: it chooses which of its calls it continues, and may crash after some.
    """
    waiting = [group for group in (*groups, *replaced) if group]
    found = []
    for index, prompt in enumerate(scheduled):
        group = next((each for each in waiting if each[0].rollout.prompt.prompt_id == prompt.prompt_id), None)
        if group is not None:
            waiting = [each for each in waiting if each is not group]
            found += [(CompletionIndex(prompt=index, sample=number), item) for number, item in enumerate(group)]
    return [] if is_agents([item for _, item in found]) else found


def _discrepancy(test: SamplingTest, level: float) -> Discrepancy:
    return Discrepancy(
        summary=(
            "tokens are not sampled from the log-probabilities that the engine reports: "
            f"{test.best_bet} ({test.num_tokens} tokens, false alarm rate 1 in {1 / level:.0f} runs)"
        ),
        fix="check the engine's logit processors: temperature, top-k, banned tokens",
    )
