"""Does the learner stand where the run does: its version, the coefficient of its KL, its reference?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcore.checks.audit.finding import Discrepancy
from rlcore.config import KlConfig
from rlcore.text.packing import TokenSequence

if TYPE_CHECKING:
    from rlcore.loop.run import Components

_PROBE = 16  # tokens on which the reference is asked again
_MOVED = 1e-3, 0.25  # nats; of the reference in float32, in half precision
_RESUMED = "what a checkpoint restores is not what the run goes on with; start the same command again"


def standing_errors(parts: Components, iteration: int, *, coefficient: float | None) -> Iterator[Discrepancy]:
    """True if the learner stands where the run does; ``coefficient``: of a KL that adapts, None before it has."""
    learner, kl = parts.learner, parts.config.kl
    if learner.policy_version != iteration - 1:
        expected, found = f"{iteration - 1} updates", str(learner.policy_version)
        yield Discrepancy(summary="where the learner stands", expected=expected, actual=found, fix=_RESUMED)
    right = kl.coefficient if coefficient is None else coefficient
    if not math.isclose(learner.kl_coefficient, right, rel_tol=1e-9):
        expected, found = f"{right:g}", f"{learner.kl_coefficient:g}"
        yield Discrepancy(summary="the coefficient of the KL", expected=expected, actual=found, fix=_RESUMED)


def next_coefficient(kl: KlConfig, now: float, *, mean_kl: float, count: int) -> float | None:
    """Where the coefficient of the KL has to stand after ``count`` completions (Ziegler et al. 2019, section 2.2).

    None where it does not adapt.
    """
    if not kl.target:
        return None
    error = min(max(mean_kl / kl.target - 1.0, -0.2), 0.2)
    return now * (1.0 + error * min(1.0, count / kl.horizon))


def reference_says(parts: Components) -> list[float]:
    """The reference's log-probabilities of a few tokens; empty where there is none."""
    learner, prompts = parts.learner, parts.prompts
    if not learner.has_reference:
        return []
    probe = TokenSequence(prompt_ids=prompts[0].token_ids[:_PROBE], completion_ids=prompts[-1].token_ids[:_PROBE])
    found: list[float] = learner.passes([probe], needs_policy=False, cut=()).ref[0].tolist()
    return found


def reference_errors(parts: Components, now: list[float], first: list[float]) -> Iterator[Discrepancy]:
    """True if the reference says what it said at the start, or when the run was interrupted."""
    moved = max((abs(one - other) for one, other in zip(now, first, strict=True)), default=0.0)
    if not moved <= _MOVED[parts.learner.facts.compute_dtype.itemsize < 4]:
        what = f"the reference has moved: it says {moved:.3g} nats else of a text than at the start"
        yield Discrepancy(summary=what, fix="the reference is frozen, and is the run's start after a resume too")
