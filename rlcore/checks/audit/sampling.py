"""Sampling test: compare sampled tokens with the log-probabilities that the engine reports, by sequential betting.

Before each token a bet states its distribution q, made from the trainer's own p, and gains ``q(token) / reported
probability``. If tokens follow the reported distribution, no bet gains on average, whatever q is: the capital is a
martingale. It reaches ``1 / level`` in a run with probability at most ``level``, for any number of checks (Ville 1939).
So the test needs no window and no correction for repeated checks, and rounding of p costs only power.

The bets, each of which gets an equal part of the capital:

- another temperature: ``q ~ p ** power``, for a few powers;
- too many or too few turn ends: ``q ~ p * e ** tilt`` on EOS tokens;
- repetition: the same tilt on tokens of the completion so far, and on those of prompt and completion;
- truncated distributions: top-k, top-p, and a minimum relative to the likeliest token;
- ranks: the position of a token in the cumulative distribution of p, ordered by probability or by id, is uniform. A bet
  that learns from earlier positions (ten bins) finds a token that never occurs; one more tests first tokens;
- single tokens: ids are assigned to 64 groups, and ``q ~ p * e ** tilt`` on one group. These 128 bets share one part of
  the capital. They find a favoured or disfavoured token in the middle of the ranks;
- other random numbers: tokens are not those that the random numbers of the run's seed choose. If the engine inverts the
  cumulative distribution by ids, they are known, and a token misses its own only by rounding;
- repeated completions: a completion continues like another one of its group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.checks.audit.features import FLOORS, GROUPS, LIKELIEST, NUCLEI, POWERS, Features

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
        """Hypothesis of the bet with the largest gain."""
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
        """Bet on tokens of one completion.

        Args:
            features: Features of the tokens.
            reported: Their log-probabilities, as the engine reports them.
            generator: Generator of the draws that spread a token over its own mass.
            tokens: The completion from its start, if the features cover all of it.
            siblings: Earlier completions of its group.
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
        probability of all other tokens. A bet is on a share of tokens with other numbers. The best series counts.
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
        """Return the JSON state for a checkpoint."""
        groups = self._groups.tolist()
        return {"logs": self._logs, "counts": self._counts, "groups": groups, "num_tokens": self.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
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
        """Return the log capital of all bets on id groups."""
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
