"""Audit of the learner's state: its version, its KL coefficients, and its reference policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.checks.audit.reference_impl import row_of
from rlcore.config import KlConfig, RlConfig
from rlcore.text.packing import TokenSequence

if TYPE_CHECKING:
    from rlcore.loop.components import Components

_PROBE = 16  # tokens on which the reference policy is compared
_MOVED = 1e-3, 0.25  # nats; tolerance in float32, in half precision
_RESUMED = "the run differs from its checkpoint; start the same command again"


def learner_state_errors(components: Components, iteration: int, *, coefficient: float | None) -> Iterator[Discrepancy]:
    """Yield discrepancies of the learner's version and KL coefficient.

    ``coefficient``: expected coefficient of an adaptive KL, or None before its first change.
    """
    learner, kl = components.learner, components.config.kl
    if learner.policy_version != iteration - 1:
        expected, found = f"{iteration - 1} updates", str(learner.policy_version)
        yield Discrepancy(summary="the learner's policy version", expected=expected, actual=found, fix=_RESUMED)
    right = kl.coefficient if coefficient is None else coefficient
    if not math.isclose(learner.kl_coefficient, right, rel_tol=1e-9):
        expected, found = f"{right:g}", f"{learner.kl_coefficient:g}"
        yield Discrepancy(summary="the coefficient of the KL", expected=expected, actual=found, fix=_RESUMED)


def next_coefficient(kl: KlConfig, now: float, *, mean_kl: float, count: int) -> float | None:
    """Return the KL coefficient after ``count`` episodes (Ziegler et al. 2019, section 2.2). None if it is fixed."""
    if not kl.target:
        return None
    error = min(max(mean_kl / kl.target - 1.0, -0.2), 0.2)
    return now * (1.0 + error * min(1.0, count / kl.horizon))


def first_penalty(config: RlConfig) -> float | None:
    """Return the coefficient of KL(old || policy) at the start of a run, or None without reference implementation."""
    row = row_of(config)
    return row.beta if row else None


def penalty_errors(metrics: Mapping[str, float], expected: float | None) -> Iterator[Discrepancy]:
    """Yield a discrepancy if an update had another coefficient of the penalty than ``expected``; None: unknown."""
    found = metrics.get("kl/penalty_coefficient", 0.0)
    if expected is not None and not math.isclose(found, expected, rel_tol=1e-9):
        summary = "the coefficient of the penalty"
        yield Discrepancy(summary=summary, expected=f"{expected:g}", actual=f"{found:g}", fix=_RESUMED)


def next_penalty(config: RlConfig, metrics: Mapping[str, float]) -> float | None:
    """Return the coefficient after an update: doubled or halved if its KL is 1.5 times off (Schulman et al. 2017)."""
    row, now = row_of(config), metrics.get("kl/penalty_coefficient", 0.0)
    if row is None:
        return None
    target, measured = row.target, metrics.get("kl/after_update", row.target)  # not logged if the policy did not move
    return now * (2.0 if measured > 1.5 * target else 0.5 if measured < target / 1.5 else 1.0)


def reference_logprobs(components: Components) -> list[float]:
    """Return the reference policy's log-probabilities of a few tokens; empty without a reference policy."""
    learner, prompts = components.learner, components.prompts
    if not learner.has_reference:
        return []
    probe = TokenSequence(prompt_ids=prompts[0].token_ids[:_PROBE], completion_ids=prompts[-1].token_ids[:_PROBE])
    found: list[float] = learner.passes([probe], needs_policy=False, cut=()).ref[0].tolist()
    return found


def reference_errors(components: Components, now: list[float], first: list[float]) -> Iterator[Discrepancy]:
    """Yield a discrepancy if the reference policy differs from the start of the run."""
    moved = max((abs(one - other) for one, other in zip(now, first, strict=True)), default=0.0)
    if not moved <= _MOVED[components.learner.facts.compute_dtype.itemsize < 4]:
        summary = f"the reference policy has changed: a log-probability differs by {moved:.3g} nats from the start"
        yield Discrepancy(summary=summary, fix="the reference policy must stay frozen, also after a resume")
