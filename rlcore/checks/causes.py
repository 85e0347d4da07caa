"""Likeliest cause of a health finding, from the figures of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

from rlcore.checks.health import HealthFinding
from rlcore.config import RlConfig

_CUT = 0.95  # fraction of truncated completions from which truncation explains equal rewards
_PARTLY_CUT = 0.3  # fraction from which it is named beside another cause
_SOLVED = 0.99  # fraction of the largest reward
_FALL = 0.6  # of the first entropy: sound runs of tests fall by up to 0.47 after one update, wrecked ones by 0.9
_FAR = 1.0  # nats per token: entropies of few prompts differ by less
_NOTHING = 0.1  # of the first entropy: little is left of it
_RISE = 2.0  # nats per token, and more than double
_KL_JUMP = 1.0  # nats per token, from one iteration to the next
_OLD_KL = 0.5  # nats per token within one update; runs of tests stay below 0.02
_SPIKE = 30.0  # times the median gradient norm of the run so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Metrics of each iteration of a run. ``since``: first iteration at which the rule exceeded its limit."""

    rows: Sequence[Mapping[str, float]]
    since: int
    rl: RlConfig

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(int(row["iteration"]), row[name]) for row in self.rows if name in row]

    def recent(self, name: str) -> list[float]:
        return [value for iteration, value in self.of(name) if iteration >= self.since]

    @property
    def reward(self) -> float | None:
        """The reward of every completion since the limit was exceeded; None if rewards differ."""
        means, spreads = self.recent("reward/mean"), self.recent("reward/std")
        is_constant = bool(means and spreads) and max(spreads) < 1e-9 and max(means) - min(means) < 1e-9
        return means[-1] if is_constant else None

    @property
    def best(self) -> float:
        """The largest reward: terms are at most 1, and so are most reward functions."""
        return math.fsum(term.weight for term in self.rl.rewards if term.weight > 0.0) or 1.0

    @property
    def main_term(self) -> str:
        """The name, in metrics, of the reward term with the largest weight."""
        return max(self.rl.rewards, key=lambda term: term.weight).kind.rpartition(":")[2] if self.rl.rewards else ""

    @property
    def is_solved(self) -> bool:
        return self.reward is not None and self.reward >= _SOLVED * self.best


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of health findings.

    Attributes:
        rules: Health rules that it explains.
        evidence: Return the sentence that names the cause, or "" if the figures do not show it.
        fix: Settings to change.
    """

    rules: tuple[str, ...]
    evidence: Callable[[Figures], str]
    fix: str


def _too_large_update(figures: Figures) -> str:
    jump = _entropy_jump(figures) or _kl_jump(figures) or _large_step(figures)
    return f"the update was too large (learning_rate = {figures.rl.learning_rate:g}): {jump}" if jump else ""


def _entropy_jump(figures: Figures) -> str:
    """Describe the update that separates all entropies before it from all later ones by a wide gap."""
    readings = figures.of("entropy/sampled")
    values = [value for _, value in readings]
    lowest, highest = list(accumulate(values, min)), list(accumulate(values, max))
    least, most = (list(accumulate(reversed(values), pick))[::-1] for pick in (min, max))  # from here on
    for index in range(1, len(values)):
        gap = lowest[index - 1] - most[index]
        fell = gap > _FALL * values[0] and (gap > _FAR or values[-1] < _NOTHING * values[0])
        if fell or least[index] - highest[index - 1] > max(_RISE, highest[index - 1]):
            change = f"entropy {'fell' if fell else 'rose'} from {values[index - 1]:.3g} to {values[index]:.3g}"
            return f"{change} nats per token after iteration {readings[index - 1][0]}"
    return ""


def _kl_jump(figures: Figures) -> str:
    readings = figures.of("kl/ref")
    for (iteration, before), (_, after) in pairwise(readings):
        if after - before > _KL_JUMP:
            return f"kl/ref rose from {before:.3g} to {after:.3g} nats per token after iteration {iteration}"
    return ""


def _large_step(figures: Figures) -> str:
    for iteration, value in figures.of("kl/old"):
        if value > _OLD_KL:
            return f"log-probabilities moved by kl/old = {value:.3g} nats per token within iteration {iteration}"
    return ""


def _gradient_spike(figures: Figures) -> str:
    norms = [(iteration, value) for iteration, value in figures.of("gradient_norm") if value > 0.0]
    for index in range(2, len(norms)):
        usual, (iteration, found) = median(value for _, value in norms[:index]), norms[index]
        if found > _SPIKE * usual:
            return f"the gradient norm rose from about {usual:.3g} to {found:.3g} at iteration {iteration}"
    return ""


def _all_cut(figures: Figures, least: float = _CUT) -> str:
    cut = figures.recent("completion/truncated")
    if figures.is_solved or not cut or fmean(cut) < least or _cut_answers_earned_more(figures, least):
        return ""
    subject = "every answer was" if min(cut) == 1.0 else f"{fmean(cut):.0%} of the answers were"
    return f"{subject} cut at sampling.max_new_tokens = {figures.rl.sampling.max_new_tokens}"


def _cut_answers_earned_more(figures: Figures, least: float) -> bool:
    """Return True if cut answers of earlier iterations had rewards, so that the cut does not explain equal ones."""
    now = figures.reward
    earlier = (row for row in figures.rows if row["iteration"] < figures.since)
    return now is not None and any(
        row.get("completion/truncated", 0.0) >= least and row.get("reward/mean", now) > now for row in earlier
    )


def _partly_cut(figures: Figures) -> str:
    cut = _all_cut(figures, _PARTLY_CUT)
    others = (_no_format, _never_solved, _constant, _all_or_nothing)
    other = next(filter(None, (cause(figures) for cause in others)), "")
    return f"{cut}, and {other}" if cut and other else ""


def _no_format(figures: Figures) -> str:
    names = {name for row in figures.rows for name in row if name.startswith("reward/term_zero/")}
    absent = [
        name.rpartition("/")[2]
        for name in sorted(names)
        if "format" in name and min(figures.recent(name), default=0) == 1
    ]
    return f"no answer has the form that the reward {absent[0]!r} requires" if absent else ""


def _solved(figures: Figures) -> str:
    return f"rewards are constant at {figures.reward:g}: the prompts are solved" if figures.is_solved else ""


def _never_solved(figures: Figures) -> str:
    found, earned = figures.reward, figures.recent(f"reward/term_zero/{figures.main_term}")
    is_zero = found is not None and (found <= 0.0 or min(earned, default=0.0) == 1.0)
    return f"rewards are constant at {found:g}: no answer is right" if is_zero else ""


def _constant(figures: Figures) -> str:
    found = figures.reward
    return "" if found is None else f"rewards are constant at {found:g}: they do not depend on the answer"


def _all_or_nothing(figures: Figures) -> str:
    means = figures.recent("reward/mean")
    return f"answers to one prompt get equal rewards, other prompts other ones (mean {means[-1]:.3g})" if means else ""


CAUSES: tuple[Cause, ...] = (
    Cause(
        ("kl", "clip", "entropy", "zero_signal", "length", "reward_hacking", "mismatch"),
        _too_large_update,
        "lower learning_rate, and start again",
    ),
    Cause(
        ("kl", "clip", "entropy", "length", "mismatch"),
        _gradient_spike,
        "lower learning_rate or update.optim.max_grad_norm; read the rollouts of that iteration",
    ),
    Cause(
        ("zero_signal", "length", "tools"),
        _all_cut,
        "raise sampling.max_new_tokens, or ask for short answers in data.<name>.system_prompt",
    ),
    Cause(
        ("zero_signal",),
        _partly_cut,
        "raise sampling.max_new_tokens; if the answers that are not cut still get equal rewards, read a few",
    ),
    Cause(
        ("zero_signal",),
        _no_format,
        "show the form in data.<name>.system_prompt or demonstrations; read a few completions",
    ),
    Cause(("zero_signal", "entropy"), _solved, "use harder prompts, or end the run here"),
    Cause(
        ("zero_signal",),
        _never_solved,
        "read a few completions: if they are right, correct the reward; else easier prompts, or more SFT",
    ),
    Cause(("zero_signal",), _constant, "correct the reward: it must differ between right and wrong answers"),
    Cause(
        ("zero_signal",),
        _all_or_nothing,
        "use prompts of medium difficulty, a larger group_size, or sampling.dynamic_sampling_rounds",
    ),
)
"""Causes from the likeliest to the least likely. A collapse and truncation come first: they look like other causes."""


def explained(finding: HealthFinding, history: Sequence[Mapping[str, float]], rl: RlConfig) -> HealthFinding:
    """Return a finding with its likeliest cause and that cause's fix, if the figures of the run show one."""
    figures = Figures(rows=history, since=finding.since, rl=rl)
    for cause in CAUSES:
        if finding.rule in cause.rules and (found := cause.evidence(figures)):
            return replace(finding, cause=found, fix=cause.fix)
    return finding


def unchanged(learning_rate: float, *, took_steps: bool = True) -> str:
    """Return the message on training that ended with the weights of its start."""
    if took_steps:
        why = f"its updates are smaller than the precision of the saved weights (learning_rate = {learning_rate:g})"
        fix = "raise learning_rate, or the number of steps"
    else:
        why = "no iteration took an optimizer step, because no group of answers had a signal"
        fix = "see the findings of zero_signal above"
    return f"health alarm: the policy did not change: {why}\n  fix: {fix}"
