"""What the first update that moves the policy holds in memory, as metrics of its iteration."""

from __future__ import annotations

from collections.abc import Callable

from rlcore.memory import Footprint, PeakMeter, kv_cache_bytes, measuring, num_parameters, optimizer_bytes
from rlcore.training.totals import UpdateStats
from tasks.steps.rl.run import RlRun


def measured_update(run: RlRun, update: Callable[[], UpdateStats]) -> tuple[UpdateStats, dict[str, float]]:
    """Do an update, and give ``memory/...`` where it is the first of the run that moves the policy; else no metrics.

    An update without signal takes no step: it has neither gradients nor an optimizer's state to be measured.
    """
    if any("memory/total_bytes" in row for row in run.history):
        return update(), {}
    learner, judges = run.learner, run.judges
    members = run.reward_model.members if run.reward_model else ()
    with measuring([judges.policy, judges.reference, judges.critic, *members], learner.optimizers) as meter:
        stats = update()
    return stats, _footprint(run, meter).metrics(num_parameters(judges.policy)) if stats.moved else {}


def _footprint(run: RlRun, meter: PeakMeter) -> Footprint:
    """The engine's copy of the weights and its cache of keys and values are worked out from their shapes."""
    policy, width = run.judges.policy, run.runtime.compute_dtype.itemsize
    together = min(run.rl.sampling.max_concurrent, run.rl.prompts_per_iteration * run.rl.group_size)
    longest = max(len(prompt.token_ids) for prompt in run.prompts) + run.rl.sampling.max_new_tokens
    return Footprint(
        weights=meter.weights + num_parameters(policy) * width,
        gradients=meter.gradients,
        optimizer=optimizer_bytes(run.learner.optimizers),
        activations=meter.activations,
        kv_cache=kv_cache_bytes(policy.config, num_sequences=together, num_tokens=longest, bytes_per_number=width),
    )
