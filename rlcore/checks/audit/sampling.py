"""Are tokens drawn from the distribution whose log-probabilities the engine reports? A bet against it, token by token.

Whoever bets says before each token how likely each is, by a distribution q that is made of the trainer's own p, and
gains ``q(token) / reported probability``. Where tokens come from what is reported, no bet gains on average, whatever q
is: the capital is a martingale, and reaches ``1 / level`` in a run with a chance of ``level`` at most, however often
one looks (Ville 1939). So there is no window, no correction for looking, and rounding of p costs power alone.

The bets, of which each gets an equal part of the capital:

- another temperature: ``q ~ p ** power``, for a few powers;
- ends that come too often or too rarely: ``q ~ p * e ** tilt`` on the tokens that end a turn;
- tokens that stand before: the same on those of the completion so far, and on those of prompt and completion;
- cut distributions: nothing outside of the likeliest k, of a share of the mass, or below a share of the likeliest;
- ranks: the place of a token in p's cumulative distribution, ordered by probability or by id, is uniform. A bettor that
  learns from the places so far (ten bins) finds a floor, a token that never comes; one more looks at first tokens;
- single tokens: ids are dealt to 64 groups, and ``q ~ p * e ** tilt`` on one group. The 128 bettors share one part of
  the capital. They find a token that is favoured or disfavoured, also in the middle of the ranks;
- random numbers that repeat: a completion goes on as a sibling of its group did, or has the numbers that the completion
  in its place had when it was looked at last (an engine that inverts the cumulative distribution by ids).

What a bet can find and how soon is the gain of a token, on average, against the logarithm of ``1 / level``:
:func:`tokens_to_find`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POWERS = (0.5, 0.7, 0.85, 0.92, 1.08, 1.2, 1.4, 2.0)
TILTS = (-1.0, -0.3, 0.3, 1.0)
LIKELIEST = (2, 10, 50)
NUCLEI = (0.5, 0.8, 0.9, 0.95, 0.99)
FLOORS = (0.02, 0.1)
BINS = 10
GROUPS = 64
GROUP_TILTS = (-math.log(2.0), math.log(2.0))
_SURE = 0.99  # what a bettor stakes on a cut distribution; the rest on p, in case that a token stands on the edge
_HALF = 0.5  # what one stakes on numbers that repeat
_TOP = 128  # tokens among which a nucleus is looked for
_NUM_SETS = len(LIKELIEST) + len(NUCLEI) + len(FLOORS)
_NUM_LEARNED = 3
NUM_BETS = len(POWERS) + 3 * len(TILTS) + _NUM_SETS + _NUM_LEARNED + 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """What bets need of n tokens of one completion, float64.

    ``own``: their log-probabilities; ``above``, ``equal``, ``below``: the mass of likelier tokens, of equally likely
    ones, of those with a smaller id; ``powers`` [n, powers]: the logarithm of what ``p ** power`` sums to; ``tilted``,
    ``is_tilted`` [n, 3]: the mass of tokens that end a turn, that stand in the completion so far, that stand in prompt
    or completion, and whether the token is one; ``kept``, ``is_kept`` [n, sets]: the same of the cut distributions;
    ``group`` and ``groups`` [n, 64]: the number of its group, and the mass of each.
    """

    own: Tensor
    above: Tensor
    equal: Tensor
    below: Tensor
    powers: Tensor
    tilted: Tensor
    is_tilted: Tensor
    kept: Tensor
    is_kept: Tensor
    group: Tensor
    groups: Tensor

    def __len__(self) -> int:
        return len(self.own)


def features_of(
    logprobs: Tensor,
    targets: Sequence[int],
    eos_ids: Sequence[int],
    *,
    before: Sequence[Sequence[int]] = (),
    prompt_ids: Sequence[int] = (),
) -> Features:
    """The features of n tokens from the whole distribution, ``logprobs`` [n, V], at the run's temperature.

    ``before``: of each token those of the completion before it; left out: none.
    """
    chosen = torch.tensor(list(targets), device=logprobs.device)[:, None]
    own, masses = logprobs.gather(-1, chosen), logprobs.exp()
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    marked = [_marked(logprobs, [eos_ids] * len(chosen))]
    earlier = list(before) or [()] * len(chosen)
    marked += [_marked(logprobs, earlier), _marked(logprobs, [(*prompt_ids, *each) for each in earlier])]
    edges = _edges(logprobs)
    columns = {
        "own": own[:, 0],
        "above": (masses * (logprobs > own)).sum(-1),
        "equal": (masses * (logprobs == own)).sum(-1),
        "below": (masses * (ids < chosen)).sum(-1),
        "powers": torch.stack([(power * logprobs).logsumexp(-1) for power in POWERS], dim=-1),
        "tilted": torch.stack([(masses * mark).sum(-1) for mark in marked], dim=-1),
        "is_tilted": torch.cat([mark.gather(-1, chosen) for mark in marked], dim=-1),
        "kept": torch.stack([(masses * (logprobs >= edge)).sum(-1) for edge in edges], dim=-1),
        "is_kept": torch.cat([own >= edge for edge in edges], dim=-1),
        "group": chosen[:, 0] % GROUPS,
        "groups": masses.new_zeros(len(masses), GROUPS).index_add_(1, ids % GROUPS, masses),
    }
    return Features(**{name: column.double().cpu() for name, column in columns.items()})


def _marked(logprobs: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Which of the vocabulary stand in a row's list: bool [n, V]."""
    marks = torch.zeros(logprobs.shape, dtype=torch.bool)
    for row, each in enumerate(tokens):
        marks[row, [token for token in each if token < marks.shape[1]]] = True
    return marks.to(logprobs.device)


def _edges(logprobs: Tensor) -> list[Tensor]:
    """The log-probability that the least likely token has of each cut distribution: [n, 1]; -inf where none is cut."""
    top = logprobs.topk(min(_TOP, logprobs.shape[-1])).values
    mass = top.exp().cumsum(-1)
    edges = [top[:, min(count, top.shape[1]) - 1, None] for count in LIKELIEST]
    for share in NUCLEI:
        place = (mass < share).sum(-1, keepdim=True)  # the first place where the mass reaches the share
        found = top.gather(-1, place.clamp(max=top.shape[1] - 1))
        edges.append(found.masked_fill(place >= top.shape[1], -torch.inf))
    return edges + [top[:, :1] + math.log(share) for share in FLOORS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Name of a completion of an iteration: of the prompt in which place, and which of its group."""

    prompt: int
    sample: int


class SamplingTest:
    """The capital of each bet, as a logarithm, and the places that the learning bettors have seen."""

    def __init__(self) -> None:
        self._logs = [0.0] * NUM_BETS
        self._seen = [[0] * BINS for _ in range(_NUM_LEARNED)]
        self._groups = torch.zeros(len(GROUP_TILTS), GROUPS, dtype=torch.float64)
        self._last: dict[Place, list[tuple[float, float]]] = {}  # the interval of each token's random number
        self.num_tokens = 0

    @property
    def log_capital(self) -> float:
        """The logarithm of the whole capital, which began as 1."""
        most = max(self._logs)
        return most + math.log(sum(math.exp(each - most) for each in self._logs) / len(self._logs))

    @property
    def best_bet(self) -> str:
        """What the bettor said who gained most."""
        tilt, group = divmod(int(self._groups.argmax()), GROUPS)
        ids = f"{group}, {group + GROUPS}, {group + 2 * GROUPS} and so on"
        kinds = ("turns end", "tokens of the completion so far come", "tokens of prompt or completion come")
        names = [f"tokens come as at {1.0 / power:.2f} times the temperature" for power in POWERS]
        names += [f"{kind} {math.exp(tilt):.1f} times as often" for kind in kinds for tilt in TILTS]
        names += [f"tokens are drawn of the {count} likeliest" for count in LIKELIEST]
        names += [f"tokens are drawn of the likeliest {share:g} of the mass" for share in NUCLEI]
        names += [f"no token is drawn below {share:g} of the likeliest" for share in FLOORS]
        names += [f"{self._shares(0)} of tokens by falling probability", f"{self._shares(1)} of tokens by their ids"]
        names.append(f"{self._shares(2)} of first tokens by falling probability")
        names.append(f"the tokens of the ids {ids} come {math.exp(GROUP_TILTS[tilt]):.1f} times as often")
        names += ["completions of a group go on alike", "completions have the random numbers of earlier ones"]
        return names[max(range(len(names)), key=self._logs.__getitem__)]

    def see(
        self,
        features: Features,
        reported: Sequence[float],
        generator: torch.Generator,
        *,
        tokens: Sequence[int] = (),
        place: Place | None = None,
        siblings: Sequence[Sequence[int]] = (),
    ) -> None:
        """Bet on tokens of one completion with their ``reported`` log-probabilities.

        ``generator``: of the draws that spread a token over its own mass. ``tokens``: the completion from its
        beginning, where the features are of it; ``siblings``: those of its group that were looked at before.
        """
        said = torch.tensor(list(reported), dtype=torch.float64)
        gain = features.own - said
        bets = [(power * features.own - features.powers[:, n] - said) for n, power in enumerate(POWERS)]
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
        gains.append(self._repeats(features, gain, place) if place else float(gain.sum()))
        before = self._logs
        self._logs = [log + each for log, each in zip(before, gains, strict=True)]
        self._logs[-3] = gains[-3]  # the capital of the groups is kept one by one
        self.num_tokens += len(said)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        groups = self._groups.tolist()
        return {"logs": self._logs, "seen": self._seen, "groups": groups, "num_tokens": self.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave."""
        self._logs, self._seen = list(state["logs"]), [list(each) for each in state["seen"]]
        self._groups = torch.tensor(state["groups"], dtype=torch.float64)
        self._last, self.num_tokens = {}, int(state["num_tokens"])

    def _learned_gains(self, features: Features, gain: Tensor, generator: torch.Generator) -> list[float]:
        first, second = torch.rand(len(features), 2, generator=generator, dtype=torch.float64).unbind(-1)
        ranks = (features.above + first * features.equal).tolist()
        ids = (features.below + second * features.own.exp()).tolist()
        total = float(gain.sum())
        return [
            total + sum(self._learned(0, place) for place in ranks),
            total + sum(self._learned(1, place) for place in ids),
            total + sum(self._learned(2, place) for place in ranks[:1]),
        ]

    def _bet_on_groups(self, features: Features, gain: float) -> float:
        """The logarithm of what all bettors on single tokens have now."""
        counts = torch.bincount(features.group.long(), minlength=GROUPS).double()
        for number, tilt in enumerate(GROUP_TILTS):
            self._groups[number] += gain + tilt * counts - (features.groups * math.expm1(tilt)).log1p().sum(0)
        return float(self._groups.flatten().logsumexp(0)) - math.log(self._groups.numel())

    def _learned(self, number: int, place: float) -> float:
        """The gain of a bettor that bets on bins by how often they came (Krichevsky and Trofimov 1981)."""
        seen = self._seen[number]
        chosen = min(int(max(place, 0.0) * BINS), BINS - 1)
        gain = math.log(BINS * (seen[chosen] + 0.5) / (sum(seen) + 0.5 * BINS))
        seen[chosen] += 1
        return gain

    def _repeats(self, features: Features, gain: Tensor, place: Place) -> float:
        """The gain of who takes each random number for that of the completion in this place when it was last seen."""
        last, total = self._last.get(place, []), float(gain.sum())
        now = list(zip(features.below.tolist(), features.own.exp().tolist(), strict=True))
        for (low, mass), (other_low, other_mass) in zip(now, last, strict=False):
            common = max(0.0, min(low + mass, other_low + other_mass) - max(low, other_low))
            total += math.log(_HALF * common / max(mass * other_mass, 1e-12) + 1.0 - _HALF)
        self._last[place] = now
        return total

    def _shares(self, number: int) -> str:
        seen = self._seen[number]
        return "the tenths have the shares " + " ".join(f"{count / max(1, sum(seen)):.2f}" for count in seen)


def _alike(features: Features, gain: Tensor, tokens: Sequence[int], siblings: Sequence[Sequence[int]]) -> float:
    """The gain of who bets that a completion goes on as one of its siblings did, each for as long as both are alike."""
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
    most = max(sums)
    return total + most + math.log(sum(math.exp(each - most) for each in sums) / len(sums))


def tokens_to_find(gain: float, *, level: float) -> float:
    """About how many tokens a bet needs that gains so much on each, in nats, to reach ``1 / level`` with its share."""
    return (math.log(NUM_BETS) - math.log(level)) / gain if gain > 0.0 else math.inf
