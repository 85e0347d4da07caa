"""A run on many processes as discrete events: who waits for whom, with long-tailed lengths and with failures.

decoding   a process of ``slots`` decodes n sequences at a time; a step takes ``step + sequence * n`` seconds
batches    all processes sample their shares of a batch; the next one begins when all are done
updates    ranks share the tokens of a batch; batch i is sampled with the weights after update i - 1 - k
failures   come at a rate for each card: a sampler's share is sampled anew, a learner goes back to its checkpoint
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of the stages. ``step``, ``sequence``: of a decoding step; ``update``, ``trained``: of an update by one
    rank, fixed and for each token; ``sync``: of new weights."""

    step: float
    sequence: float
    update: float
    trained: float
    sync: float
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """``samplers`` of ``sampler_cards`` each, and ``ranks``. ``cores``: where processes share so many, else 0."""

    samplers: int
    ranks: int
    sampler_cards: int = 1
    cores: int = 0

    @property
    def cards(self) -> int:
        """All of them."""
        return self.samplers * self.sampler_cards + self.ranks

    def slower(self, processes: int) -> float:
        """How many times longer each of ``processes`` takes on the cores that there are."""
        return max(1.0, processes / self.cores) if self.cores else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a batch is: lengths are exp(N(log ``median``, ``spread``)), up to ``longest``; 0 spread: all the median."""

    sequences: int
    prompt_tokens: float
    median: float
    spread: float
    longest: int

    def draw(self, draws: random.Random) -> list[int]:
        """The lengths of a batch."""
        found = (self.median * math.exp(draws.gauss(0.0, self.spread)) for _ in range(self.sequences))
        return [max(1, min(self.longest, round(length))) for length in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """``rate``: of one card, per second. Seconds until a process is there again, and between two checkpoints."""

    rate: float
    restart: float = 300.0
    checkpoint: float = 900.0


NONE = Failures(rate=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What a simulated run gave. ``idle``: the share of all cards' time in which they waited for others."""

    seconds: float
    tokens: int
    idle: float
    failures: int


def decode_seconds(lengths: Sequence[int], costs: Costs) -> float:
    """How long one process takes for these completions, which take the slots in their order as they become free."""
    ends: list[int] = []
    seconds, now = 0.0, 0

    def advance(until: int) -> float:
        return (until - now) * (costs.step + costs.sequence * len(ends))

    for length in lengths:
        if len(ends) == costs.slots:
            seconds += advance(ends[0])
            now = heapq.heappop(ends)
        heapq.heappush(ends, now + length)
    while ends:
        seconds += advance(ends[0])
        now = heapq.heappop(ends)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch of completions. ``shares``: seconds that each process decodes its share of it; ``trained``: its tokens
    with those of its prompts."""

    shares: Sequence[float]
    tokens: int
    trained: float


def draw_batches(costs: Costs, fleet: Fleet, load: Load, *, iterations: int, seed: int = 0) -> list[Batch]:
    """What a run samples; it depends neither on how far the engine is ahead nor on what fails."""
    draws, slower = random.Random(seed), fleet.slower(fleet.samplers)
    found = []
    for _ in range(iterations):
        lengths = load.draw(draws)
        shares = [decode_seconds(lengths[place :: fleet.samplers], costs) for place in range(fleet.samplers)]
        tokens = sum(lengths)
        seconds = [share * slower for share in shares]
        found.append(Batch(shares=seconds, tokens=tokens, trained=tokens + load.prompt_tokens))
    return found


def simulate(
    costs: Costs, fleet: Fleet, load: Load, *, staleness: int, iterations: int, failures: Failures = NONE, seed: int = 0
) -> Course:
    """A run from its first rollouts to its last update."""
    batches = draw_batches(costs, fleet, load, iterations=iterations, seed=seed)
    return course_of(batches, costs, fleet, staleness=staleness, failures=failures, seed=seed + 1)


def course_of(
    batches: Sequence[Batch],
    costs: Costs,
    fleet: Fleet,
    *,
    staleness: int,
    failures: Failures = NONE,
    seed: int = 0,
) -> Course:
    """A run that samples these batches; ``seed``: of what fails."""
    deaths = random.Random(seed)
    sampled, learned = [0.0], [0.0]  # when batch, and update, of each iteration is done; the first is before the run
    busy, count = 0.0, 0
    checkpoint = 0.0
    for iteration, batch in enumerate(batches, 1):
        begin = max(sampled[-1], learned[max(0, iteration - 1 - staleness)])
        done = []
        for share in batch.shares:
            lost, died = _lost(share, fleet.sampler_cards, failures, deaths)
            done.append(begin + lost + share)
            count += died
        busy += sum(batch.shares) * fleet.sampler_cards
        sampled.append(max(done))
        update = (costs.update + costs.trained * batch.trained / fleet.ranks) * fleet.slower(fleet.ranks)
        start = max(sampled[-1], learned[-1])
        died = _poisson(update * fleet.ranks * failures.rate, deaths)
        again = min(start - checkpoint, failures.checkpoint) if died else 0.0
        end = start + update + died * (failures.restart + 0.5 * update) + again
        if end - checkpoint >= failures.checkpoint:
            checkpoint = end
        count += died
        busy += update * fleet.ranks
        learned.append(end + costs.sync)
    seconds = learned[-1]
    tokens = sum(batch.tokens for batch in batches)
    return Course(seconds=seconds, tokens=tokens, idle=1.0 - busy / (seconds * fleet.cards), failures=count)


def _lost(seconds: float, cards: int, failures: Failures, draws: random.Random) -> tuple[float, int]:
    """Seconds that a process loses before it is through ``seconds`` of work without a failure, and its failures."""
    rate, lost, count = failures.rate * cards, 0.0, 0
    while rate and (until := draws.expovariate(rate)) < seconds:
        lost += until + failures.restart
        count += 1
    return lost, count


def _poisson(mean: float, draws: random.Random) -> int:
    """How many failures come, where ``mean`` are expected."""
    return sum(1 for _ in _arrivals(mean, draws))


def _arrivals(mean: float, draws: random.Random) -> Iterator[float]:
    now = 0.0
    while mean and (now := now + draws.expovariate(mean)) < 1.0:
        yield now
