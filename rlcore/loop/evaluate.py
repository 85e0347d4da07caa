"""Held-out accuracy during a run: for the curve, and for the health rule that watches for reward hacking."""

from __future__ import annotations

from collections.abc import Callable

from rlcore.evaluation import accuracy
from rlcore.loop.parts import HeldOut
from rlcore.rewards.base import is_correct, score_each
from rlcore.sampling.base import Sampler, SamplingParams


def evaluate_held_out(
    sampler: Sampler, held_out: HeldOut, *, max_new_tokens: int, note: Callable[[str], None]
) -> dict[str, float]:
    """Greedy accuracy on the held-out problems with its interval, as ``eval/...``.

    A problem that could not be answered or graded counts as wrong, and is counted in ``eval/failed``.

    Raises:
        SamplingError: the engine is broken.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, num_samples=1, greedy=True)
    groups = sampler.sample(held_out.prompts, params, seed=0)
    scores = score_each([rollout for group in groups for rollout in group], held_out.verifier)
    failed = [score.error for score in scores if score.error]
    if failed:
        note(f"{len(failed)} of {len(scores)} held-out problems count as wrong, as one: {failed[0]}")
    interval = accuracy([is_correct(score) for score in scores], confidence=held_out.confidence)
    return {
        "eval/accuracy": interval.mean,
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
        "eval/failed": float(len(failed)),
    }
