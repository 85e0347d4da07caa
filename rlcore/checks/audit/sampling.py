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
- repeated random numbers: a completion continues like another one of its group, or has the random numbers of the
  completion with the same index in an earlier iteration (for engines that invert the cumulative distribution by ids).

The expected gain per token against the logarithm of ``1 / level`` decides how soon a bet finds an error:
:func:`tokens_to_find`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
NUM_BETS = len(POWERS) + 3 * len(TILTS) + _NUM_SETS + _NUM_LEARNED + 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionIndex:
    """Index of a completion: of its prompt in the iteration, and of the completion in its group."""

    prompt: int
    sample: int


class SamplingTest:
    """Log capital of each bet, and the counts of the learning bets."""

    def __init__(self) -> None:
        self._logs = [0.0] * NUM_BETS
        self._counts = [[0] * BINS for _ in range(_NUM_LEARNED)]
        self._groups = torch.zeros(len(GROUP_TILTS), GROUPS, dtype=torch.float64)
        self._last: dict[CompletionIndex, list[tuple[float, float]]] = {}  # interval of each token's random number
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
        names += ["completions of a group repeat each other", "completions have the random numbers of earlier ones"]
        return names[max(range(len(names)), key=self._logs.__getitem__)]

    def update(
        self,
        features: Features,
        reported: Sequence[float],
        generator: torch.Generator,
        *,
        tokens: Sequence[int] = (),
        index: CompletionIndex | None = None,
        siblings: Sequence[Sequence[int]] = (),
    ) -> None:
        """Bet on tokens of one completion.

        Args:
            features: Features of the tokens.
            reported: Their log-probabilities, as the engine reports them.
            generator: Generator of the draws that spread a token over its own mass.
            tokens: The completion from its start, if the features cover all of it.
            index: Index of the completion, or None if the features do not cover all of it.
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
        gains.append(self._repeats(features, gain, index) if index else float(gain.sum()))
        before = self._logs
        self._logs = [log + each for log, each in zip(before, gains, strict=True)]
        self._logs[-3] = gains[-3]  # the bets on id groups have their own capital
        self.num_tokens += len(column)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint."""
        groups = self._groups.tolist()
        return {"logs": self._logs, "counts": self._counts, "groups": groups, "num_tokens": self.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._logs, self._counts = list(state["logs"]), [list(each) for each in state["counts"]]
        self._groups = torch.tensor(state["groups"], dtype=torch.float64)
        self._last, self.num_tokens = {}, int(state["num_tokens"])

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

    def _repeats(self, features: Features, gain: Tensor, index: CompletionIndex) -> float:
        """Return the gain of a bet on the random numbers of the last completion with this index."""
        last, total = self._last.get(index, []), float(gain.sum())
        now = list(zip(features.below.tolist(), features.own.exp().tolist(), strict=True))
        for (low, mass), (other_low, other_mass) in zip(now, last, strict=False):
            common = max(0.0, min(low + mass, other_low + other_mass) - max(low, other_low))
            total += math.log(_HALF * common / max(mass * other_mass, 1e-12) + 1.0 - _HALF)
        self._last[index] = now
        return total

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


def tokens_to_find(gain: float, *, level: float) -> float:
    """Return about how many tokens a bet with this gain per token, in nats, needs to reach ``1 / level``."""
    return (math.log(NUM_BETS) - math.log(level)) / gain if gain > 0.0 else math.inf
