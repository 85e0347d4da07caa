"""Health rules: warn about or stop an RL run based on its metrics.

Rules are functions of the metric history, so a resumed run reaches the same findings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.config import HealthConfig, Limit

History = Sequence[Mapping[str, float]]
Level = Literal["warn", "alarm", "stop"]
Reading = Callable[[History, int], float | None]
_BASELINE = 3  # first iterations, whose mean length is the baseline
_WINDOW = 5  # values in a moving average
_NOISE_FACTOR = 2.0  # of two half-widths at 95 %: more than five standard errors of their difference
_MIN_LENGTH = 1e-6  # tokens; a ratio of shorter lengths overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRule:
    """A limit on one metric.

    Attributes:
        make_reading: Create, for the metric, the function that maps ``(history, index)`` to a value or None.
        message: One sentence for the glossary.
        fix: Settings to change, for the log.
        lag: Updates between the measured weights and the end of the iteration: 1 for rollout metrics, else 0.
    """

    name: str
    metric: str
    message: str
    fix: str
    make_reading: Callable[[str], Reading] = lambda metric: raw(metric)
    lag: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthFinding:
    """A rule that currently exceeds a limit.

    Attributes:
        level: ``warn`` beyond the first limit, ``alarm`` beyond the second, ``stop`` after ``patience`` such readings.
        since: First iteration of the current streak.
        cause: Likeliest cause, of :mod:`rlcore.checks.causes`; "" if the figures show none.
    """

    rule: str
    metric: str
    level: Level
    since: int
    value: float
    limit: float
    fix: str
    cause: str = ""

    def __str__(self) -> str:
        reading = f"{self.rule}: {self.metric}={self.value:.4g} limit={self.limit:g} since iteration {self.since}"
        return f"{self.cause} ({reading})" if self.cause else reading


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """State of all rules after an iteration.

    Attributes:
        last_healthy_by_rule: Newest iteration that each rule confirmed within its stop limit, or 0. It never decreases.
    """

    findings: tuple[HealthFinding, ...]
    last_healthy_by_rule: Mapping[str, int]
    iteration: int

    @property
    def last_healthy(self) -> int:
        """Newest iteration that every rule confirmed, or 0."""
        return max(0, min(self.last_healthy_by_rule.values(), default=self.iteration))

    @property
    def stop(self) -> HealthFinding | None:
        return next((finding for finding in self.findings if finding.level == "stop"), None)


def raw(name: str) -> Reading:
    """Read the metric unchanged."""
    return lambda history, index: history[index].get(name)


def moving_average(name: str) -> Reading:
    """Read the mean of the metric's last five values."""
    return lambda history, index: _mean_of_last(history, index, name) if name in history[index] else None


def if_stepped(name: str) -> Reading:
    """Read the metric, or None if no optimizer step was taken, because then nothing could change."""
    return lambda history, index: None if history[index].get("gradient_norm") == 0.0 else history[index].get(name)


def signal_of_groups(history: History, index: int) -> float | None:
    """Return the fraction of zero-signal groups; None with a critic, which learns from equal rewards too."""
    row = history[index]
    return None if "value/explained_variance" in row else row.get("groups/zero_signal")


def length_ratio(history: History, index: int) -> float | None:
    """Return the ratio (at least 1) of the mean length to that of the first iterations, or its inverse."""
    length = history[index].get("completion/length")
    first = [row["completion/length"] for row in history[: min(_BASELINE, index + 1)] if "completion/length" in row]
    usual = sum(first) / max(1, len(first))
    if not length or min(abs(length), abs(usual)) < _MIN_LENGTH:
        return None
    return max(length / usual, usual / length)


class RewardHacking:
    """Drop of held-out accuracy below its best while the training reward has risen.

    Returns 0 if the drop is below twice the sum of both interval half-widths, which is within noise: the best of many
    evaluations is lucky.
    """

    def __init__(self) -> None:
        self._accuracy, self._half_width, self._reward = -math.inf, 0.0, 0.0  # of the best evaluation

    def __call__(self, history: History, index: int) -> float | None:
        """Return the reading at an index; call it for each index in order."""
        row = history[index]
        if "eval/accuracy" not in row:
            return None
        reward, accuracy = _mean_of_last(history, index, "reward/mean"), row["eval/accuracy"]
        if accuracy > self._accuracy:
            self._accuracy, self._half_width, self._reward = accuracy, _half_width(row), reward
        drop = self._accuracy - accuracy
        is_noise = drop <= _NOISE_FACTOR * (self._half_width + _half_width(row))
        return 0.0 if is_noise or reward <= self._reward else drop


def _half_width(row: Mapping[str, float]) -> float:
    return (row.get("eval/accuracy_high", 0.0) - row.get("eval/accuracy_low", 0.0)) / 2.0


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        name="kl",
        metric="kl/ref",
        message="The policy is far from the reference policy.",
        fix="lower learning_rate, raise kl.coefficient, or set update.early_stop_ref_kl",
    ),
    HealthRule(
        name="clip",
        metric="clip/fraction",
        make_reading=if_stepped,
        message="The steps are so large that clipping removes most of the gradient.",
        fix="lower learning_rate, update.num_epochs or update.num_minibatches",
    ),
    HealthRule(
        name="entropy",
        metric="entropy",
        message="The policy is certain of every token and no longer explores.",
        fix="raise update.entropy_coefficient, sampling.temperature or the upper clip; lower learning_rate",
    ),
    HealthRule(
        name="zero_signal",
        metric="groups/zero_signal",
        make_reading=lambda _: signal_of_groups,
        message="All completions of a prompt have equal rewards, for almost every prompt. Not applied with a critic.",
        fix="all solved: harder prompts; none solved: easier ones or more SFT; or set sampling.dynamic_sampling_rounds",
    ),
    HealthRule(
        name="length",
        metric="completion/length",
        make_reading=lambda _: length_ratio,
        message="Completions are many times longer or shorter than in the run's first three iterations.",
        fix="read the shortest and longest completions; fix a length reward; check update.truncated_completions",
    ),
    HealthRule(
        name="reward_hacking",
        metric="eval/accuracy",
        make_reading=lambda _: RewardHacking(),
        lag=0,
        message="The reward (mean of five) is above that of the best evaluation; accuracy has dropped beyond noise.",
        fix="reward hacking: read the completions with the highest reward; fix the reward; raise kl.coefficient",
    ),
    HealthRule(
        name="critic",
        metric="value/explained_variance",
        make_reading=moving_average,
        message="The critic (mean of five iterations) is worse than a constant, so advantages are noise.",
        fix="critic.warmup_iterations, critic.init_from = 'reward_model', lower critic.learning_rate",
    ),
    HealthRule(
        name="tools",
        metric="episode/parsed",
        message="Almost no episode has a tool call that could be parsed.",
        fix="show a call in data.<name>.system_prompt or demonstrations; check episodes.call_format, max_turn_tokens",
    ),
    HealthRule(
        name="mismatch",
        metric="mismatch/kl",
        message="Engine and trainer compute different probabilities for the same weights.",
        fix="same precision and temperature on both sides; see docs/engines.md",
    ),
)


class HealthMonitor:
    """Apply the rules to a growing history, reading each row once."""

    def __init__(self, config: HealthConfig) -> None:
        limits = config.limits if config.action != "off" else {}
        self._rules = [_RuleState(rule, limits[rule.name]) for rule in RULES if rule.name in limits]
        self._num_read = 0

    def update(self, history: History) -> HealthReport:
        """Read new rows and return the report after the last one."""
        for index, state in itertools.product(range(self._num_read, len(history)), self._rules):
            state.read(history, index)
        self._num_read = len(history)
        last = int(history[-1]["iteration"]) if history else 0
        findings = tuple(filter(None, (state.finding for state in self._rules)))
        healthy = {state.rule.name: last if state.last_healthy is None else state.last_healthy for state in self._rules}
        return HealthReport(findings=findings, last_healthy_by_rule=healthy, iteration=last)


class _RuleState:
    """Streaks of one rule, and its last healthy iteration: 0 if none is healthy, None before the first reading."""

    def __init__(self, rule: HealthRule, limit: Limit) -> None:
        self.rule = rule
        self.last_healthy: int | None = None
        self._limit, self._reading, self._value = limit, rule.make_reading(rule.metric), 0.0
        self._stop, self._warn = _Streak(limit.stop), _Streak(limit.warn)

    def read(self, history: History, index: int) -> None:
        reading = self._reading(history, index)
        if reading is None:
            return
        row = history[index]
        self._value, self.last_healthy = reading, self.last_healthy or 0
        for streak in (self._stop, self._warn):
            streak.add(int(row["iteration"]), is_beyond=self._limit.exceeds(reading, streak.limit))
        if not self._stop.count:
            self.last_healthy = _measured_iteration(self.rule, row)

    @property
    def finding(self) -> HealthFinding | None:
        streak = self._stop if self._stop.count else self._warn
        if not streak.count:
            return None
        level: Level = "warn"
        if streak is self._stop:
            level = "stop" if streak.count >= self._limit.patience else "alarm"
        name, metric, fix = self.rule.name, self.rule.metric, self.rule.fix
        return HealthFinding(
            rule=name, metric=metric, level=level, since=streak.since, value=self._value, limit=streak.limit, fix=fix
        )


@dataclass(slots=True)
class _Streak:
    limit: float
    count: int = 0
    since: int = 0

    def add(self, iteration: int, *, is_beyond: bool) -> None:
        self.since = self.since if self.count else iteration
        self.count = self.count + 1 if is_beyond else 0


def _measured_iteration(rule: HealthRule, row: Mapping[str, float]) -> int:
    """Return the iteration that made the weights which a row measures; rollouts may be several updates old."""
    staleness = math.ceil(row.get("staleness", 0.0)) if rule.lag else 0
    return int(row["iteration"]) - rule.lag - staleness


def _mean_of_last(history: History, index: int, name: str) -> float:
    values = [row[name] for row in history[max(0, index + 1 - _WINDOW) : index + 1] if name in row]
    return sum(values) / len(values) if values else 0.0
