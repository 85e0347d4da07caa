"""Health rules: metric limits with patience that warn, stop a run, and name its last healthy checkpoint.

All is a function of the run's history, so a resumed run decides as one that was never interrupted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rlcore.config import HealthConfig, Limit

History = Sequence[Mapping[str, float]]
Level = Literal["warn", "alarm", "stop"]
Reading = Callable[[History, int], float | None]
_BASELINE = 3  # iterations at the start of a run that its lengths are compared with
_SMOOTHED = 5  # readings of a noisy metric that are averaged
_NOISE_FACTOR = 2.0  # of two half widths at 95 %: more than five standard errors of their difference
_MIN_LENGTH = 1e-6  # tokens; no completion is as short, and a ratio of such numbers leaves the floats


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """One rule: ``reader`` makes what reads, place by place of a history, what its bounds are held against there.

    A reading is None where the iteration has none. ``lag``: by how many updates the weights that the metric speaks of
    are older than those that the iteration ends with: 1 where it is measured on rollouts, 0 where after the update.
    """

    name: str
    metric: str
    make_reading: Callable[[], Reading]
    message: str
    fix: str
    lag: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthFinding:
    """A rule that is beyond one of its bounds now.

    ``level``: ``warn`` beyond the first bound, ``alarm`` beyond the second, ``stop`` beyond it for as long as the
    rule's patience. ``since``: the iteration of the first such reading of the row that goes on.
    """

    rule: str
    metric: str
    level: Level
    since: int
    value: float
    limit: float
    fix: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.metric} reads {self.value:.4g}, bound {self.limit:g}, since iteration {self.since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """What the rules say after an iteration.

    ``last_healthy_by_rule``: Newest iteration that each rule confirmed within its stop limit, or 0. It never decreases.
    """

    findings: tuple[HealthFinding, ...]
    last_healthy_by_rule: Mapping[str, int]
    iteration: int

    @property
    def last_healthy(self) -> int:
        """Checkpoints of this iteration or an earlier one hold weights that every rule has seen within its bound."""
        return max(0, min(self.last_healthy_by_rule.values(), default=self.iteration))

    @property
    def stop(self) -> HealthFinding | None:
        """The first rule whose patience is used up, if there is one."""
        return next((finding for finding in self.findings if finding.level == "stop"), None)


def raw(name: str) -> Reading:
    """The metric itself."""
    return lambda history, place: history[place].get(name)


def moving_average(name: str) -> Reading:
    """The mean of the metric's last five values."""
    return lambda history, place: _mean_of_last(history, place, name) if name in history[place] else None


def if_stepped(name: str) -> Reading:
    """The metric; None where no step was taken, so that nothing could be out of bounds, and nothing was put right."""
    return lambda history, place: None if history[place].get("gradient_norm") == 0.0 else history[place].get(name)


def signal_of_groups(history: History, place: int) -> float | None:
    """Share of groups without signal; None with a critic, where equal rewards teach too."""
    row = history[place]
    return None if "value/explained_variance" in row else row.get("groups/zero_signal")


def length_ratio(history: History, place: int) -> float | None:
    """How many times longer, or shorter, completions are than in the first iterations (at least 1)."""
    length = history[place].get("completion/length")
    first = [row["completion/length"] for row in history[: min(_BASELINE, place + 1)] if "completion/length" in row]
    if not length or not first:
        return None
    usual = sum(first) / len(first)
    if min(abs(length), abs(usual)) < _MIN_LENGTH:
        return None
    return max(length / usual, usual / length)


class RewardHacking:
    """Held-out accuracy lost since its best evaluation while the training reward has risen; 0 while it has not.

    0 also while chance explains the loss. The best of many evaluations is lucky, so a later one is lower as a rule,
    with a hundred problems by a tenth: it has to be lower by twice the half widths of both intervals.
    """

    def __init__(self) -> None:
        self._accuracy, self._half_width, self._reward = -math.inf, 0.0, 0.0  # of the best evaluation

    def __call__(self, history: History, place: int) -> float | None:
        """The reading at a place, after those before it."""
        row = history[place]
        if "eval/accuracy" not in row:
            return None
        reward, accuracy = _mean_of_last(history, place, "reward/mean"), row["eval/accuracy"]
        if accuracy > self._accuracy:
            self._accuracy, self._half_width, self._reward = accuracy, _half_width(row), reward
        lost = self._accuracy - accuracy
        is_chance = lost <= _NOISE_FACTOR * (self._half_width + _half_width(row))
        return 0.0 if is_chance or reward <= self._reward else lost


def _half_width(row: Mapping[str, float]) -> float:
    """Of the interval of an evaluation; 0 where a history has no intervals."""
    return (row.get("eval/accuracy_high", 0.0) - row.get("eval/accuracy_low", 0.0)) / 2.0


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        name="kl",
        metric="kl/ref",
        make_reading=partial(raw, "kl/ref"),
        message="The policy has left the reference further than any useful run does.",
        fix="lower learning_rate, raise kl.coefficient, or set update.early_stop_ref_kl",
    ),
    HealthRule(
        name="clip",
        metric="clip/fraction",
        make_reading=partial(if_stepped, "clip/fraction"),
        message="The steps are so large that the clip switches off most of what they should teach.",
        fix="lower learning_rate, update.num_epochs or update.num_minibatches",
    ),
    HealthRule(
        name="entropy",
        metric="entropy",
        make_reading=partial(raw, "entropy"),
        message="The policy is certain of every token: it explores no more.",
        fix="raise update.entropy_coefficient, sampling.temperature or the upper clip; lower learning_rate",
    ),
    HealthRule(
        name="zero_signal",
        metric="groups/zero_signal",
        make_reading=lambda: signal_of_groups,
        message="All completions of a prompt are worth the same, for every prompt. Not judged where there is a critic.",
        fix="all solved: harder prompts; none solved: easier ones or more SFT; or set sampling.dynamic_sampling_rounds",
    ),
    HealthRule(
        name="length",
        metric="completion/length",
        make_reading=lambda: length_ratio,
        message="Completions are many times longer or shorter than in the run's first three iterations.",
        fix="read the shortest and longest completions; fix a length reward; check update.truncated_completions",
    ),
    HealthRule(
        name="reward_hacking",
        metric="eval/accuracy",
        make_reading=RewardHacking,
        lag=0,
        message="The reward (mean of five) is above that of the best evaluation, and accuracy has fallen for certain.",
        fix="reward hacking: read the completions with the highest reward; fix the reward; raise kl.coefficient",
    ),
    HealthRule(
        name="critic",
        metric="value/explained_variance",
        make_reading=partial(moving_average, "value/explained_variance"),
        message="The critic (mean of five iterations) is worse than a constant, so advantages are noise.",
        fix="critic.warmup_iterations, critic.init_from = 'reward_model', lower critic.learning_rate",
    ),
    HealthRule(
        name="tools",
        metric="episode/parsed",
        make_reading=partial(raw, "episode/parsed"),
        message="There are tools, and next to no episode holds a call of one that could be parsed.",
        fix="show a call in data.<name>.system_prompt or demonstrations; check episodes.call_format, max_turn_tokens",
    ),
    HealthRule(
        name="mismatch",
        metric="mismatch/kl",
        make_reading=partial(raw, "mismatch/kl"),
        message="Engine and trainer compute different probabilities for the same weights.",
        fix="same precision and temperature on both sides; see docs/engines.md",
    ),
)


class HealthMonitor:
    """What the rules say of a history that grows; what they have read of it is all that is kept."""

    def __init__(self, config: HealthConfig) -> None:
        limits = config.limits if config.action != "off" else {}
        self._courses = [_RuleState(rule, limits[rule.name]) for rule in RULES if rule.name in limits]
        self._num_read = 0

    def update(self, history: History) -> HealthReport:
        """What they say after the history's last iteration; the rows before are those of the last call."""
        for place, course in itertools.product(range(self._num_read, len(history)), self._courses):
            course.read(history, place)
        self._num_read = len(history)
        last = int(history[-1]["iteration"]) if history else 0
        findings = tuple(filter(None, (course.finding for course in self._courses)))
        seen = {
            course.rule.name: last if course.last_healthy is None else course.last_healthy for course in self._courses
        }
        return HealthReport(findings=findings, last_healthy_by_rule=seen, iteration=last)


def check_health(history: History, config: HealthConfig) -> HealthReport:
    """What the rules say after the history's last iteration."""
    return HealthMonitor(config).update(history)


class _RuleState:
    """One rule's readings so far: the row of the newest that are beyond a bound, and the last within the stop bound.

    ``seen``: the newest iteration whose checkpoint it has seen within that bound; 0 where there is none, None where it
    has never read anything.
    """

    def __init__(self, rule: HealthRule, limit: Limit) -> None:
        self.rule = rule
        self.last_healthy: int | None = None
        self._limit, self._reading, self._value = limit, rule.make_reading(), 0.0
        self._stop, self._warn = _Streak(limit.stop), _Streak(limit.warn)

    def read(self, history: History, place: int) -> None:
        """Take the reading at the next place."""
        reading = self._reading(history, place)
        if reading is None:
            return
        row = history[place]
        self._value, self.last_healthy = reading, self.last_healthy or 0
        for bound in (self._stop, self._warn):
            bound.add(int(row["iteration"]), is_beyond=self._limit.exceeds(reading, bound.limit))
        if not self._stop.count:
            self.last_healthy = _seen(self.rule, row)

    @property
    def finding(self) -> HealthFinding | None:
        """What is beyond a bound now."""
        row = self._stop if self._stop.count else self._warn
        if not row.count:
            return None
        level: Level = "warn"
        if row is self._stop:
            level = "stop" if row.count >= self._limit.patience else "alarm"
        name, metric, fix = self.rule.name, self.rule.metric, self.rule.fix
        return HealthFinding(
            rule=name, metric=metric, level=level, since=row.since, value=self._value, limit=row.limit, fix=fix
        )


@dataclass(slots=True)
class _Streak:
    """How many readings in a row are beyond a bound now, and the iteration of the first."""

    limit: float
    count: int = 0
    since: int = 0

    def add(self, iteration: int, *, is_beyond: bool) -> None:
        self.since = self.since if self.count else iteration
        self.count = self.count + 1 if is_beyond else 0


def _seen(rule: HealthRule, row: Mapping[str, float]) -> int:
    """The iteration that made the weights which a reading of this row speaks of; rollouts may be staler than one."""
    staleness = math.ceil(row.get("staleness", 0.0)) if rule.lag else 0
    return int(row["iteration"]) - rule.lag - staleness


def _mean_of_last(history: History, place: int, name: str) -> float:
    values = [row[name] for row in history[max(0, place + 1 - _SMOOTHED) : place + 1] if name in row]
    return sum(values) / len(values) if values else 0.0
