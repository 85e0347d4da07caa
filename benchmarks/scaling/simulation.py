"""Discrete-event simulation of a run on many processes, with long-tailed lengths and failures.

decoding   a process of ``slots`` decodes n sequences at a time; a step takes ``step + sequence * n`` seconds
batches    all processes sample their parts of a batch; the next one begins when all are done
updates    ranks share the tokens of a batch; batch i is sampled with the weights after update i - 1 - k
failures   come at a rate for each GPU: a sampler repeats its part, a learner restores its checkpoint
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of the stages.

    ``step``, ``sequence``: of a decoding step; ``update``, ``trained``: of an update by one rank, fixed and for each
    token; ``sync``: of new weights.
    """

    step: float
    sequence: float
    update: float
    trained: float
    sync: float
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Fleet of ``samplers`` with ``sampler_cards`` each, and ``ranks``. ``cores``: shared by the processes, else 0."""

    samplers: int
    ranks: int
    sampler_cards: int = 1
    cores: int = 0

    @property
    def cards(self) -> int:
        """Total number of GPUs."""
        return self.samplers * self.sampler_cards + self.ranks

    def slower(self, processes: int) -> float:
        """Return the slowdown of ``processes`` on the shared cores."""
        return max(1.0, processes / self.cores) if self.cores else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Batch lengths: exp(N(log ``median``, ``spread``)), up to ``longest``; with spread 0 all are the median."""

    sequences: int
    prompt_tokens: float
    median: float
    spread: float
    longest: int

    def draw(self, draws: random.Random) -> list[int]:
        """Draw the lengths of a batch."""
        found = (self.median * math.exp(draws.gauss(0.0, self.spread)) for _ in range(self.sequences))
        return [max(1, min(self.longest, round(length))) for length in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failures. ``rate``: of one GPU, per second. Seconds until a process is back, and between two checkpoints."""

    rate: float
    restart: float = 300.0
    checkpoint: float = 900.0


NONE = Failures(rate=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Simulated run. ``idle``: the fraction of all GPUs' time spent waiting."""

    seconds: float
    tokens: int
    idle: float
    failures: int


def decode_seconds(lengths: Sequence[int], costs: Costs) -> float:
    """Return the time of one process for these completions, which take free slots in their order."""
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
    """Batch of completions.

    ``shares``: decoding seconds of each process; ``trained``: its tokens with those of its prompts.
    """

    shares: Sequence[float]
    tokens: int
    trained: float


def draw_batches(costs: Costs, fleet: Fleet, load: Load, *, iterations: int, seed: int = 0) -> list[Batch]:
    """Draw the batches of a run, independent of prefetch and failures."""
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
    """Simulate a run from its first rollouts to its last update."""
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
    """Simulate a run on these batches; ``seed``: of the failures."""
    deaths = random.Random(seed)
    sampled, learned = [0.0], [0.0]  # end of batch and update of each iteration; the first is before the run
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
    """Return the seconds that failures add to ``seconds`` of work of a process, and their number."""
    rate, lost, count = failures.rate * cards, 0.0, 0
    while rate and (until := draws.expovariate(rate)) < seconds:
        lost += until + failures.restart
        count += 1
    return lost, count


def _poisson(mean: float, draws: random.Random) -> int:
    """Draw the number of failures with mean ``mean``."""
    return sum(1 for _ in _arrivals(mean, draws))


def _arrivals(mean: float, draws: random.Random) -> Iterator[float]:
    now = 0.0
    while mean and (now := now + draws.expovariate(mean)) < 1.0:
        yield now
