"""What the first update of an online-RL run holds in memory, as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.memory import Footprint, kv_cache_bytes, measuring, num_parameters, optimizer_bytes
from tasks.rl_run import RlRun


@contextmanager
def first_update_memory(run: RlRun, iteration: int, metrics: dict[str, float]) -> Iterator[None]:
    """Measure the block if it is the first iteration's update, and add ``memory/...`` to ``metrics``.

    The engine's copy of the weights and its cache of keys and values are worked out from their shapes.
    """
    if iteration > 1:
        yield
        return
    learner, judges = run.learner, run.judges
    members = run.reward_model.members if run.reward_model else ()
    with measuring([judges.policy, judges.reference, judges.critic, *members], learner.optimizers) as meter:
        yield
    size, width = num_parameters(judges.policy), run.runtime.compute_dtype.itemsize
    together = min(run.rl.sampling.max_concurrent, run.rl.prompts_per_iteration * run.rl.group_size)
    longest = max(len(prompt.token_ids) for prompt in run.prompts) + run.rl.sampling.max_new_tokens
    footprint = Footprint(
        weights=meter.weights + size * width,
        gradients=meter.gradients,
        optimizer=optimizer_bytes(learner.optimizers),
        activations=meter.activations,
        kv_cache=kv_cache_bytes(
            judges.policy.config, num_sequences=together, num_tokens=longest, bytes_per_number=width
        ),
    )
    metrics |= footprint.metrics(size)
