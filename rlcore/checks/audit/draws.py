"""Choice of rollouts for the sampling test of an iteration, and its result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.checks.audit import Discrepancy
from rlcore.checks.audit.learner_state import rollout_seed
from rlcore.sampling.base import replicas_of
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.training.audit.features import FLOORS, GROUPS, LIKELIEST, NUCLEI, POWERS, Features
from rlcore.training.audit.slow_path import MAX_TOKENS, SlowPathResult
from rlcore.types import Prompt, Rollout, ScoredRollout

if TYPE_CHECKING:
    from rlcore.components import Components

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
        is_half = self._components.coarser_dtype.itemsize < 4
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
        "tokens are not sampled from the log-probabilities that the engine reports: "
        f"{test.best_bet} ({test.num_tokens} tokens, false alarm rate 1 in {1 / level:.0f} runs)",
        fix="check the engine's logit processors: temperature, top-k, banned tokens",
    )


TILTS = (-1.0, -0.3, 0.3, 1.0)
BINS = 10
GROUP_TILTS = (-math.log(2.0), math.log(2.0))
_SURE = 0.99  # stake on a truncated distribution; the rest is on p, because a token may be at the edge
_HALF = 0.5  # stake on repeated random numbers
_NUM_SETS = len(LIKELIEST) + len(NUCLEI) + len(FLOORS)
_NUM_LEARNED = 3
NUM_BETS = len(POWERS) + 3 * len(TILTS) + _NUM_SETS + _NUM_LEARNED + 4
_SHARES = (1.0, 0.1)  # of tokens with other random numbers, one bet each
_ROUNDING = {True: (0.05, 0.05), False: (2e-3, 2e-4)}  # by half precision: of a cumulative probability; misses beyond


class SamplingTest:
    """Log capital of each bet, and the counts of the learning bets."""

    def __init__(self) -> None:
        self._logs = [0.0] * NUM_BETS
        self._counts = [[0] * BINS for _ in range(_NUM_LEARNED)]
        self._groups = torch.zeros(len(GROUP_TILTS), GROUPS, dtype=torch.float64)
        self.num_tokens = 0

    @property
    def log_capital(self) -> float:
        """Logarithm of the mean capital, which starts at 1."""
        highest = max(self._logs)
        return highest + math.log(sum(math.exp(each - highest) for each in self._logs) / len(self._logs))

    @property
    def best_bet(self) -> str:
        tilt, group = divmod(int(self._groups.argmax()), GROUPS)
        ids = f"{group}, {group + GROUPS}, {group + 2 * GROUPS} and so on"
        kinds = ("turns end", "tokens of the completion so far occur", "tokens of prompt or completion occur")
        names = [f"tokens are sampled at {1.0 / power:.2f} times the temperature" for power in POWERS]
        names += [f"{kind} {math.exp(tilt):.1f} times as often" for kind in kinds for tilt in TILTS]
        names += [f"tokens are sampled with top_k = {count}" for count in LIKELIEST]
        names += [f"tokens are sampled with top_p = {top_p:g}" for top_p in NUCLEI]
        names += [f"tokens are sampled with min_p = {min_p:g}" for min_p in FLOORS]
        names += [f"{self._bins(0)} of tokens by falling probability", f"{self._bins(1)} of tokens by their ids"]
        names.append(f"{self._bins(2)} of first tokens by falling probability")
        names.append(f"the tokens of the ids {ids} occur {math.exp(GROUP_TILTS[tilt]):.1f} times as often")
        names.append("completions of a group repeat each other")
        names += [f"{share:.0%} of the tokens are not those of the seed's random numbers" for share in _SHARES]
        return names[max(range(len(names)), key=self._logs.__getitem__)]

    def update(
        self,
        features: Features,
        reported: Sequence[float],
        generator: torch.Generator,
        *,
        tokens: Sequence[int] = (),
        siblings: Sequence[Sequence[int]] = (),
    ) -> None:
        """Bet on tokens of one completion, by the log-probabilities that the engine reports.

        ``generator``: of the draws that spread a token over its own mass. ``tokens``: the completion from its start, if
        the features cover all of it. ``siblings``: earlier completions of its group.
        """
        column = torch.tensor(list(reported), dtype=torch.float64)
        gain = features.own - column
        bets = [(power * features.own - features.powers[:, n] - column) for n, power in enumerate(POWERS)]
        bets += [
            gain + tilt * features.is_tilted[:, kind] - (features.tilted[:, kind] * math.expm1(tilt)).log1p()
            for kind in range(3)
            for tilt in TILTS
        ]
        stakes = _SURE * features.is_kept / features.kept.clamp(min=1e-12) + 1.0 - _SURE
        bets += [gain + stakes[:, number].log() for number in range(_NUM_SETS)]
        gains = [float(bet.sum()) for bet in bets]
        gains += self._learned_gains(features, gain, generator)
        gains.append(self._bet_on_groups(features, float(gain.sum())))
        gains.append(_alike(features, gain, tokens, siblings))
        self._logs = [log + each for log, each in zip(self._logs, [*gains, *(0.0 for _ in _SHARES)], strict=True)]
        self._logs[-2 - len(_SHARES)] = gains[-2]  # the bets on id groups have their own capital
        self.num_tokens += len(column)

    def bet_on_numbers(
        self, features: Features, positions: Sequence[int], numbers: Sequence[Tensor], *, is_half: bool
    ) -> None:
        """Bet that tokens are not those that random numbers choose; ``numbers``: each possible series of them, [T].

        A token's own number misses it with a small probability, by rounding; another number misses it with the
        probability of all other tokens. The best series counts.
        """
        slack, rate = _ROUNDING[is_half]
        low, high = features.below - slack, features.below + features.own.exp() + slack
        others = 1.0 - (high.clamp(max=1.0) - low.clamp(min=0.0))
        for number, share in enumerate(_SHARES, start=-len(_SHARES)):
            missing = (share * others).clamp(min=rate)  # no bet where rounding misses as often
            hit, miss = ((1.0 - missing) / (1.0 - rate)).log(), (missing / rate).log()
            drawn = [series[list(positions)].double() for series in numbers]
            gains = [float(torch.where((low <= each) & (each <= high), hit, miss).sum()) for each in drawn]
            self._logs[number] += min(gains)
        self.num_tokens += len(positions)

    def state(self) -> dict[str, Any]:
        groups = self._groups.tolist()
        return {"logs": self._logs, "counts": self._counts, "groups": groups, "num_tokens": self.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        if len(state["logs"]) != NUM_BETS:  # of other bets: the test begins again
            return
        self._logs, self._counts = list(state["logs"]), [list(each) for each in state["counts"]]
        self._groups = torch.tensor(state["groups"], dtype=torch.float64)
        self.num_tokens = int(state["num_tokens"])

    def _learned_gains(self, features: Features, gain: Tensor, generator: torch.Generator) -> list[float]:
        first, second = torch.rand(len(features), 2, generator=generator, dtype=torch.float64).unbind(-1)
        ranks = (features.above + first * features.equal).tolist()
        ids = (features.below + second * features.own.exp()).tolist()
        total = float(gain.sum())
        return [
            total + sum(self._learned(0, quantile) for quantile in ranks),
            total + sum(self._learned(1, quantile) for quantile in ids),
            total + sum(self._learned(2, quantile) for quantile in ranks[:1]),
        ]

    def _bet_on_groups(self, features: Features, gain: float) -> float:
        counts = torch.bincount(features.group.long(), minlength=GROUPS).double()
        for number, tilt in enumerate(GROUP_TILTS):
            self._groups[number] += gain + tilt * counts - (features.groups * math.expm1(tilt)).log1p().sum(0)
        return float(self._groups.flatten().logsumexp(0)) - math.log(self._groups.numel())

    def _learned(self, number: int, quantile: float) -> float:
        """Return the gain of a bet on bins by their counts so far (Krichevsky and Trofimov 1981)."""
        counts = self._counts[number]
        chosen = min(int(max(quantile, 0.0) * BINS), BINS - 1)
        gain = math.log(BINS * (counts[chosen] + 0.5) / (sum(counts) + 0.5 * BINS))
        counts[chosen] += 1
        return gain

    def _bins(self, number: int) -> str:
        counts = self._counts[number]
        return "the ten bins have the fractions " + " ".join(f"{each / max(1, sum(counts)):.2f}" for each in counts)


def _alike(features: Features, gain: Tensor, tokens: Sequence[int], siblings: Sequence[Sequence[int]]) -> float:
    """Return the gain of a bet that a completion continues like one of its siblings, until they differ."""
    total, chances = float(gain.sum()), features.own.exp().tolist()
    if not siblings or not tokens:
        return total
    sums = []
    for sibling in siblings:
        found = 0.0
        for token, other, chance in zip(tokens, sibling, chances, strict=False):
            found += math.log(_HALF * (token == other) / max(chance, 1e-12) + 1.0 - _HALF)
            if token != other:
                break
        sums.append(found)
    highest = max(sums)
    return total + highest + math.log(sum(math.exp(each - highest) for each in sums) / len(sums))
