"""Are tokens drawn from the distribution whose log-probabilities the engine reports? A bet against it, token by token.

Whoever bets says before each token how likely each is, by a distribution q that is made of the trainer's own p, and
gains ``q(token) / reported probability``. Where tokens come from what is reported, no bet gains on average, whatever q
is: the capital is a martingale, and reaches ``1 / level`` in a run with a chance of ``level`` at most, however often
one looks (Ville 1939). So there is no window, no correction for looking, and rounding of p costs power alone.

The bets, of which each gets an equal part of the capital:

- another temperature: ``q ~ p ** power``, for a few powers;
- ends that come too often or too rarely: ``q ~ p * e ** tilt`` on the tokens that end a turn;
- ranks: the place of a token in p's cumulative distribution, ordered by probability or by id, is uniform. A bettor that
  learns from the places so far (ten bins) finds top-k, top-p, a floor, a token that never comes;
- single tokens: ids are dealt to 64 groups, and ``q ~ p * e ** tilt`` on one group. The 128 bettors share one part of
  the capital. They find a token that is favoured or disfavoured, also in the middle of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

POWERS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
TILTS = (-1.0, -0.3, 0.3, 1.0)
BINS = 10
GROUPS = 64
GROUP_TILTS = (-math.log(2.0), math.log(2.0))


def features_of(logprobs: Tensor, targets: Tensor, temperature: float, eos_ids: Sequence[int]) -> Tensor:
    """What bets need of each token, float64 [n, 7 + powers + groups].

    Its log-probability, the mass of likelier tokens, of equally likely ones, of those with a smaller id, of those that
    end a turn, whether it is one of these, for each power the logarithm of what ``p ** power`` sums to, the number of
    its group, and the mass of each group.

    ``logprobs``: [n, V], at ``temperature`` already; ``targets``: int64 [n].
    """
    own = logprobs.gather(-1, targets.to(logprobs.device)[:, None])
    masses = logprobs.exp()
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    smaller = ids < targets.to(logprobs.device)[:, None]
    ends = [number for number in eos_ids if number < logprobs.shape[-1]]
    is_end = torch.isin(targets, torch.tensor(ends, dtype=targets.dtype)).to(own)
    columns = [
        own[:, 0],
        (masses * (logprobs > own)).sum(-1),
        (masses * (logprobs == own)).sum(-1),
        (masses * smaller).sum(-1),
        masses[:, ends].sum(-1),
        is_end,
        *((power * logprobs).logsumexp(-1) for power in POWERS),
        targets.to(logprobs.device) % GROUPS,
    ]
    groups = masses.new_zeros(len(masses), GROUPS).index_add_(1, ids % GROUPS, masses)
    return torch.cat([torch.stack([column.double() for column in columns], dim=-1), groups.double()], dim=-1)


class SamplingTest:
    """The capital of each bet, as a logarithm, and the places that the learning bettors have seen."""

    def __init__(self) -> None:
        self._logs = [0.0] * (len(POWERS) + len(TILTS) + 3)
        self._seen = [[0] * BINS, [0] * BINS]
        self._groups = torch.zeros(len(GROUP_TILTS), GROUPS, dtype=torch.float64)
        self.num_tokens = 0

    @property
    def log_capital(self) -> float:
        """The logarithm of the whole capital, which began as 1."""
        most = max(self._logs)
        return most + math.log(sum(math.exp(each - most) for each in self._logs) / len(self._logs))

    @property
    def best_bet(self) -> str:
        """What the bettor said who gained most."""
        names = [f"tokens come as at {1.0 / power:.2f} times the temperature" for power in POWERS]
        names += [f"turns end {math.exp(tilt):.1f} times as often" for tilt in TILTS]
        names += [f"{self._shares(0)} of tokens by falling probability", f"{self._shares(1)} of tokens by their ids"]
        tilt, group = divmod(int(self._groups.argmax()), GROUPS)
        ids = f"{group}, {group + GROUPS}, {group + 2 * GROUPS} and so on"
        names.append(f"the tokens of the ids {ids} come {math.exp(GROUP_TILTS[tilt]):.1f} times as often")
        return names[max(range(len(names)), key=self._logs.__getitem__)]

    def see(self, features: Tensor, reported: Sequence[float], generator: torch.Generator) -> None:
        """Bet on tokens: ``features`` [n, 7 + powers + groups] of :func:`features_of`, ``reported`` log-probabilities.

        ``generator``: of the draws that spread a token over its own mass.
        """
        draws = torch.rand(len(reported), 2, generator=generator, dtype=torch.float64).tolist()
        scalars, masses = features[:, :-GROUPS], features[:, -GROUPS:]
        self._bet_on_groups(scalars, masses, reported)
        for (*row, _), said, (first, second) in zip(scalars.tolist(), reported, draws, strict=True):
            own, above, equal, below, ending, is_end, *normalisers = row
            gain = own - said
            bets = [power * own - norm - said for power, norm in zip(POWERS, normalisers, strict=True)]
            bets += [gain + tilt * is_end - math.log1p(ending * math.expm1(tilt)) for tilt in TILTS]
            places = (above + first * equal, below + second * math.exp(own))
            bets += [gain + self._learned(number, place) for number, place in enumerate(places)]
            self._logs[:-1] = [log + bet for log, bet in zip(self._logs[:-1], bets, strict=True)]
            self.num_tokens += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        groups = self._groups.tolist()
        return {"logs": self._logs, "seen": self._seen, "groups": groups, "num_tokens": self.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave."""
        self._logs, self._seen = list(state["logs"]), [list(each) for each in state["seen"]]
        self._groups = torch.tensor(state["groups"], dtype=torch.float64)
        self.num_tokens = int(state["num_tokens"])

    def _bet_on_groups(self, scalars: Tensor, masses: Tensor, reported: Sequence[float]) -> None:
        gains = scalars[:, 0].sum() - math.fsum(reported)
        counts = torch.bincount(scalars[:, -1].long(), minlength=GROUPS).double()
        for number, tilt in enumerate(GROUP_TILTS):
            self._groups[number] += gains + tilt * counts - (masses * math.expm1(tilt)).log1p().sum(0)
        self._logs[-1] = float(self._groups.flatten().logsumexp(0)) - math.log(self._groups.numel())

    def _learned(self, number: int, place: float) -> float:
        """The gain of a bettor that bets on bins by how often they came (Krichevsky and Trofimov 1981)."""
        seen = self._seen[number]
        chosen = min(int(max(place, 0.0) * BINS), BINS - 1)
        gain = math.log(BINS * (seen[chosen] + 0.5) / (sum(seen) + 0.5 * BINS))
        seen[chosen] += 1
        return gain

    def _shares(self, number: int) -> str:
        seen = self._seen[number]
        return "the tenths have the shares " + " ".join(f"{count / max(1, sum(seen)):.2f}" for count in seen)
