"""Rules that judge a run by its curves: what to warn of, when to stop, and which checkpoint is still sound.

Everything is a function of the run's history, one mapping of metrics per iteration with its number under ``iteration``.
The history is in every checkpoint, so a resumed run judges as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.config import HealthConfig, Limit

History = Sequence[Mapping[str, float]]
_BASELINE = 3  # iterations at the start of a run that its lengths are compared with
_SMOOTHED = 5  # readings of a noisy metric that are averaged
_LUCK = 2.0  # of two half widths at 95 %: more than five standard errors of their difference
_EMPTY = 1e-6  # tokens; no completion is as short, and a ratio of such numbers leaves the floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: ``reading`` is what its bounds are held against after the iteration at a place of the history.

    A reading is None where the iteration has none. ``lag``: by how many updates the weights that the metric speaks of
    are older than those that the iteration ends with: 1 where it is measured on rollouts, 0 where after the update.
    """

    name: str
    metric: str
    reading: Callable[[History, int], float | None]
    lag: int
    says: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A rule that is beyond one of its bounds now.

    ``level``: ``warn`` beyond the first bound, ``alarm`` beyond the second, ``stop`` beyond it for as long as the
    rule's patience. ``since``: the iteration of the first such reading of the row that goes on.
    """

    rule: str
    metric: str
    level: Literal["warn", "alarm", "stop"]
    since: int
    value: float
    bound: float
    fix: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.metric} reads {self.value:.4g}, bound {self.bound:g}, since iteration {self.since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the rules say after an iteration.

    ``seen``: by rule, the newest iteration whose checkpoint it has seen within its stop bound; 0 where there is none.
    A rule's own never goes back, so what any later verdict calls ``sound`` is one of these, or newer than the readings.
    """

    findings: tuple[Finding, ...]
    seen: Mapping[str, int]
    last: int

    @property
    def sound(self) -> int:
        """Checkpoints of this iteration or an earlier one hold weights that every rule has seen within its bound."""
        return max(0, min(self.seen.values(), default=self.last))

    @property
    def stop(self) -> Finding | None:
        """The first rule whose patience is used up, if there is one."""
        return next((finding for finding in self.findings if finding.level == "stop"), None)


def plain(name: str) -> Callable[[History, int], float | None]:
    """The metric itself."""
    return lambda history, place: history[place].get(name)


def smoothed(name: str) -> Callable[[History, int], float | None]:
    """The mean of the metric's last five values."""
    return lambda history, place: _mean_of_last(history, place, name) if name in history[place] else None


def of_steps(name: str) -> Callable[[History, int], float | None]:
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
    if min(abs(length), abs(usual)) < _EMPTY:
        return None
    return max(length / usual, usual / length)


def gamed_reward(history: History, place: int) -> float | None:
    """Held-out accuracy lost since its best evaluation while the training reward has risen; 0 while it has not.

    0 also while chance explains the loss. The best of many evaluations is lucky, so a later one is lower as a rule,
    with a hundred problems by a tenth: it has to be lower by twice the half widths of both intervals.
    """
    if "eval/accuracy" not in history[place]:
        return None
    evaluated = [i for i in range(place + 1) if "eval/accuracy" in history[i]]
    best = max(evaluated, key=lambda i: history[i]["eval/accuracy"])
    lost = history[best]["eval/accuracy"] - history[place]["eval/accuracy"]
    if lost <= _LUCK * (_half_width(history[best]) + _half_width(history[place])):
        return 0.0
    if _mean_of_last(history, place, "reward/mean") <= _mean_of_last(history, best, "reward/mean"):
        return 0.0
    return lost


def _half_width(row: Mapping[str, float]) -> float:
    """Of the interval of an evaluation; 0 where a history has no intervals."""
    return (row.get("eval/accuracy_high", 0.0) - row.get("eval/accuracy_low", 0.0)) / 2.0


RULES: tuple[Rule, ...] = (
    Rule(
        name="kl",
        metric="kl/ref",
        reading=plain("kl/ref"),
        lag=1,
        says="The policy has left the reference further than any useful run does.",
        fix="lower learning_rate, raise kl.coefficient, or set update.max_ref_kl",
    ),
    Rule(
        name="clip",
        metric="clip/fraction",
        reading=of_steps("clip/fraction"),
        lag=1,
        says="The steps are so large that the clip switches off most of what they should teach.",
        fix="lower learning_rate, update.epochs or update.minibatches",
    ),
    Rule(
        name="entropy",
        metric="entropy",
        reading=plain("entropy"),
        lag=1,
        says="The policy is certain of every token: it explores no more.",
        fix="raise update.entropy_coefficient, sampling.temperature or the upper clip; lower learning_rate",
    ),
    Rule(
        name="zero_signal",
        metric="groups/zero_signal",
        reading=signal_of_groups,
        lag=1,
        says="All completions of a prompt are worth the same, for every prompt. Not judged where there is a critic.",
        fix="all solved: harder prompts; none solved: easier ones or more SFT; or set sampling.max_replacements",
    ),
    Rule(
        name="length",
        metric="completion/length",
        reading=length_ratio,
        lag=1,
        says="Completions are many times longer or shorter than in the run's first three iterations.",
        fix="read the shortest and the longest completions; add or fix a length reward; check update.truncated",
    ),
    Rule(
        name="gaming",
        metric="eval/accuracy",
        reading=gamed_reward,
        lag=0,
        says="The reward (mean of five) is above that of the best evaluation, and accuracy has fallen beyond chance.",
        fix="reward hacking: read the completions with the highest reward; fix the reward; raise kl.coefficient",
    ),
    Rule(
        name="critic",
        metric="value/explained_variance",
        reading=smoothed("value/explained_variance"),
        lag=1,
        says="The critic (mean of five iterations) is worse than a constant, so advantages are noise.",
        fix="critic.warmup_iterations, critic.initialise_from = 'reward_model', lower critic.learning_rate",
    ),
    Rule(
        name="tools",
        metric="episode/parsed",
        reading=plain("episode/parsed"),
        lag=1,
        says="There are tools, and next to no episode holds a call of one that could be parsed.",
        fix="show a call in data.<name>.system or in demonstrations; check episodes.call_format and max_turn_tokens",
    ),
    Rule(
        name="mismatch",
        metric="mismatch/kl",
        reading=plain("mismatch/kl"),
        lag=1,
        says="Engine and trainer compute different probabilities for the same weights.",
        fix="same precision and temperature on both sides; see docs/engines.md",
    ),
)


def judge(history: History, config: HealthConfig) -> Verdict:
    """What the rules say after the history's last iteration."""
    limits = config.limits if config.action != "off" else {}
    judged = {rule.name: _judge_rule(rule, limits[rule.name], history) for rule in RULES if rule.name in limits}
    return Verdict(
        findings=tuple(finding for finding, _ in judged.values() if finding is not None),
        seen={name: seen for name, (_, seen) in judged.items()},
        last=int(history[-1]["iteration"]) if history else 0,
    )


def _judge_rule(rule: Rule, limit: Limit, history: History) -> tuple[Finding | None, int]:
    """The rule's finding, and the newest iteration whose checkpoint it has seen within its stop bound."""
    last = int(history[-1]["iteration"]) if history else 0
    row, within = _row_beyond(rule, limit, limit.stop, history)
    never_read = not row and within is None
    sound = last if never_read else _seen(rule, history[within]) if within is not None else 0
    level: Literal["warn", "alarm", "stop"] = "stop" if len(row) >= limit.patience else "alarm"
    bound = limit.stop
    if not row:
        row, _ = _row_beyond(rule, limit, limit.warn, history)
        level, bound = "warn", limit.warn
    if not row:
        return None, sound
    return Finding(
        rule=rule.name,
        metric=rule.metric,
        level=level,
        since=row[-1][0],
        value=row[0][1],
        bound=bound,
        fix=rule.fix,
    ), sound


def _row_beyond(rule: Rule, limit: Limit, bound: float, history: History) -> tuple[list[tuple[int, float]], int | None]:
    """The newest readings up to the last one within the bound, newest first, and the place of that one."""
    row: list[tuple[int, float]] = []
    for place in reversed(range(len(history))):
        reading, iteration = rule.reading(history, place), int(history[place]["iteration"])
        if reading is None:
            continue
        if not limit.exceeds(reading, bound):
            return row, place
        row.append((iteration, reading))
    return row, None


def _seen(rule: Rule, row: Mapping[str, float]) -> int:
    """The iteration that made the weights which a reading of this row speaks of; rollouts may be staler than one."""
    staleness = math.ceil(row.get("staleness", 0.0)) if rule.lag else 0
    return int(row["iteration"]) - rule.lag - staleness


def _mean_of_last(history: History, place: int, name: str) -> float:
    values = [row[name] for row in history[max(0, place + 1 - _SMOOTHED) : place + 1] if name in row]
    return sum(values) / len(values) if values else 0.0
