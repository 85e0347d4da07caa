"""Audit of the learner's state and of the numbers that control an update: KL coefficients, epochs, minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rlcore.checks.audit import Discrepancy
from rlcore.config import KlConfig, RlConfig, UpdateConfig
from rlcore.seeding import derive_seed, shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.reference_impl import clamped, row_of
from rlcore.training.minibatches import digest_of_digests

if TYPE_CHECKING:
    from rlcore.components import Components
    from rlcore.training.update_stats import UpdateStats
    from rlcore.types import TrainingSample

_PROBE = 16  # tokens on which the reference policy is compared
_MOVED = 1e-3, 0.25  # nats; tolerance in float32, in half precision
_EDGE = 1e-4  # relative distance from a limit within which rounding decides
_RESUMED = "the run differs from its checkpoint; start the same command again"
_CHANGED = "samples changed between the audit and the gradient: on the way to a rank, or between minibatches"


def learner_state_errors(components: Components, iteration: int, *, coefficient: float | None) -> Iterator[Discrepancy]:
    """Yield discrepancies of the learner's version and KL coefficient.

    ``coefficient``: expected coefficient of an adaptive KL, or None before its first change.
    """
    learner, kl = components.learner, components.config.kl
    if learner.policy_version != iteration - 1:
        expected = f"{iteration - 1} updates"
        yield Discrepancy("the learner's policy version", expected, learner.policy_version, fix=_RESUMED)
    right = kl.coefficient if coefficient is None else coefficient
    if not math.isclose(learner.kl_coefficient, right, rel_tol=1e-9):
        expected, found = f"{right:g}", f"{learner.kl_coefficient:g}"
        yield Discrepancy("the coefficient of the KL", expected, found, fix=_RESUMED)


def mean_kl(samples: Sequence[TrainingSample], metrics: Mapping[str, float], config: RlConfig) -> float:
    """Return the KL to the reference policy in nats per episode, which an adaptive coefficient follows.

    In the reward it is the sum of old minus reference log-probabilities of an episode; in the loss, ``metrics`` have it
    per token.
    """
    total = metrics.get("kl/ref", 0.0) * sum(sum(sample.loss_mask.tolist()) for sample in samples)
    if config.kl.apply_to == "reward":
        columns = [
            (each.old_logprobs.tolist(), each.ref_logprobs.tolist(), each.loss_mask.tolist()) for each in samples
        ]
        tokens = chain(*(zip(*each, strict=True) for each in columns))
        total = math.fsum(clamped(old - ref) for old, ref, own in tokens if own)
    return total / len({sample.episode for sample in samples})


def measure_error(name: str, found: float, expected: float, *, tolerance: float = _EDGE) -> Iterator[Discrepancy]:
    """Yield a discrepancy if a measured number is not the expected one."""
    if not abs(found - expected) <= tolerance * (1.0 + abs(expected)):
        fix = "check how it is measured: over which tokens, per token or per episode, before or after the steps"
        yield Discrepancy(name, f"{expected:.6g}", f"{found:.6g}", fix=fix)


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
        yield Discrepancy("the coefficient of the penalty", f"{expected:g}", f"{found:g}", fix=_RESUMED)


def next_penalty(config: RlConfig, metrics: Mapping[str, float]) -> float | None:
    """Return the coefficient after an update: doubled or halved if its KL is 1.5 times off (Schulman et al. 2017)."""
    row, now = row_of(config), metrics.get("kl/penalty_coefficient", 0.0)
    if row is None:
        return None
    target, measured = row.target, metrics.get("kl/after_update", row.target)  # not logged if the policy did not move
    return now * (2.0 if measured > 1.5 * target else 0.5 if measured < target / 1.5 else 1.0)


def arrival_errors(
    stats: UpdateStats, digests: Sequence[tuple[int, str]], update: UpdateConfig, *, seed: int
) -> Iterator[Discrepancy]:
    """Yield a discrepancy unless each rank trained on the audited samples, in the minibatches of each epoch's shuffle.

    ``digests``: group and digest of each audited sample; ``seed``: of the update.
    """
    groups: dict[int, list[str]] = {}
    for group, digest in digests:
        groups.setdefault(group, []).append(digest)
    members, whole = list(groups.values()), sorted(digest for _, digest in digests)
    if not stats.arrived:
        yield Discrepancy("the learner reports no digest of its training samples", fix=_CHANGED)
    for rank, epochs in enumerate(stats.arrived):
        for epoch, found in enumerate(epochs):
            order, count = shuffled(len(members), seed, "minibatches", epoch), min(update.num_minibatches, len(members))
            parts = [sorted(chain(*(members[n] for n in order[first::count]))) for first in range(count)]
            if list(found) != list(map(digest_of_digests, parts)):
                where = f"epoch {epoch + 1}" + (f" on rank {rank}" if len(stats.arrived) > 1 else "")
                yield Discrepancy(
                    f"the training samples of {where} are not the {len(whole)} audited ones, each once, in "
                    f"{count} minibatches by this epoch's shuffle (found {len(found)})",
                    fix=_CHANGED,
                )
                return


def epoch_errors(stats: UpdateStats, update: UpdateConfig) -> Iterator[Discrepancy]:
    """Yield a discrepancy unless an update ended with its last epoch, or the first whose KL exceeds a limit."""
    limits, done = (update.early_stop_kl, update.early_stop_ref_kl), len(stats.arrived[0]) if stats.arrived else 0
    for epoch in range(1, done + 1):
        count, *sums = stats.epoch_kl[epoch - 1] if epoch <= len(stats.epoch_kl) else (0.0, 0.0, 0.0)
        pairs = [(total / max(1.0, count), limit) for total, limit in zip(sums, limits, strict=True) if limit]
        is_last, is_over, may_be = (
            epoch == update.num_epochs,
            *(any(mean > limit * (1.0 + edge) for mean, limit in pairs) for edge in (_EDGE, -_EDGE)),
        )
        if (epoch < done and (is_last or is_over)) or (epoch == done and not (is_last or may_be)):
            shown = ", ".join(f"{mean:.4g} (limit {limit:g})" for mean, limit in pairs) or "no limit is set"
            wanted = f"{epoch}" if epoch < done else f"more than {done} of {update.num_epochs}"
            summary = f"the epochs of the update, by the KL of epoch {epoch}, {shown}"
            fix = "check how the mean KL of an epoch is measured and compared with its limit"
            yield Discrepancy(summary, wanted, done, fix=fix)
            return


def rollout_seed(seed: int, *purpose: int) -> int:
    """Return the seed that the rollouts of an iteration, or of a round of dynamic sampling in it, must have."""
    return derive_seed(seed, "rollouts", *purpose)


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
        yield Discrepancy(summary, fix="the reference policy must stay frozen, also after a resume")
