"""Which rollouts of an iteration are held against the distributions that their engine reports, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.checks.audit.finding import Discrepancy
from rlcore.checks.audit.sampling import Place, SamplingTest
from rlcore.checks.audit.slow_path import MOST_TOKENS, SlowPathResult
from rlcore.sampling.base import replicas_of
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.types import Prompt, ScoredRollout

if TYPE_CHECKING:
    from rlcore.loop.run import Components

Groups = Sequence[Sequence[ScoredRollout]]
Drawn = Sequence[tuple[Place, ScoredRollout]]
_TOKENS = 512  # of an iteration, about, that are bet on


class DrawAudit:
    """The bets of one run against its engine."""

    def __init__(self, parts: Components) -> None:
        self._parts, self._config, self._test = parts, parts.health.audit, SamplingTest()
        # A script replays what it was given: nothing is drawn.
        self._draws = not any(isinstance(engine, ScriptedSampler) for engine in replicas_of(parts.engine))

    @property
    def evidence(self) -> float:
        """The capital of all bets, as a logarithm to base 10."""
        return self._test.log_capital / math.log(10.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._test.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave, or anew with nothing."""
        self._test = SamplingTest()
        if state:
            self._test.restore(state)

    def choose(self, groups: Groups, replaced: Groups, asked: Sequence[Prompt], iteration: int) -> Drawn:
        """Rollouts by chance, whatever they are, until they have tokens enough: one with its siblings, then others."""
        everyone = fairly_drawn(groups, replaced, asked) if self._draws else []
        if not everyone:
            return []
        order = shuffled(len(everyone), self._parts.seed, "audit", "tokens", iteration)
        first = everyone[order[0]][0].prompt
        order.sort(key=lambda number: everyone[number][0].prompt != first)
        found, count = list[tuple[Place, ScoredRollout]](), 0
        for number in order:
            if count >= _TOKENS and len(found) >= self._config.rollouts:
                break
            found.append(everyone[number])
            count += min(MOST_TOKENS, sum(everyone[number][1].rollout.loss_mask))
        return found

    def bet(self, drawn: Drawn, found: SlowPathResult, iteration: int) -> Discrepancy | None:
        """Hold the tokens of some rollouts against what the engine reported of them."""
        seed, siblings = derive_seed(self._parts.seed, "audit", iteration), dict[int, list[list[int]]]()
        looked = zip(drawn, found.drawn_places, found.features, strict=True)
        for number, ((place, item), places, features) in enumerate(looked):
            rollout = item.rollout
            is_whole = len(places) == sum(rollout.loss_mask)
            tokens = [rollout.completion_ids[each] for each in places] if is_whole else []
            self._test.see(
                features,
                [rollout.sampler_logprobs[each] for each in places],
                generator(seed, "places within tokens", number),
                tokens=tokens,
                place=place if is_whole else None,
                siblings=siblings.get(place.prompt, ()),
            )
            if is_whole:
                siblings.setdefault(place.prompt, []).append(tokens)
        level = self._config.false_alarm_rate
        return _misdrawn(self._test, level) if self._test.log_capital >= -math.log(level) else None


def fairly_drawn(groups: Groups, replaced: Groups, asked: Sequence[Prompt]) -> list[tuple[Place, ScoredRollout]]:
    """Rollouts that stand here whatever their tokens are: those of the prompts that were asked first.

    What is trained on was chosen, where groups without signal are replaced or cut completions are left out.
    """
    waiting = [group for group in (*groups, *replaced) if group]
    found = []
    for place, prompt in enumerate(asked):
        group = next((each for each in waiting if each[0].rollout.prompt.prompt_id == prompt.prompt_id), None)
        if group is not None:
            waiting = [each for each in waiting if each is not group]
            found += [(Place(prompt=place, sample=number), item) for number, item in enumerate(group)]
    return found


def _misdrawn(test: SamplingTest, level: float) -> Discrepancy:
    return Discrepancy(
        summary=(
            "tokens are not drawn from the log-probabilities that the engine reports: over "
            f"{test.num_tokens} tokens the bet that {test.best_bet} has won what chance gives once in {1 / level:.0f}"
        ),
        fix="compare what the engine does to its logits before it draws with what it reports: temperature, top-k, bans",
    )
