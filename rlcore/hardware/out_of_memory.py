"""Retry after out-of-memory errors with smaller micro-batches, which gives the same result.

Loss weights are normalized over the whole optimizer step before packing, and no sequence sees another. Micro-batches
can therefore be split between any sequences; only the order of sums changes. An error inside a backward pass leaves a
partial gradient behind, so an attempt must begin with cleared gradients.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from rlcore.errors import TrainingError
from rlcore.hardware.sharded import is_single_process
from rlcore.text.packing import TokenSequence

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)


def retry_smaller(attempt: Callable[[int], T], tokens: int, *, longest: int, setting: str = "") -> tuple[T, int]:
    """Call ``attempt`` with fewer tokens until it fits; return its result and the tokens of a micro-batch.

    Args:
        attempt: Work with a number of tokens per micro-batch. Retried from the start with half as many.
        longest: Tokens of the longest sequence, which cannot be split.
        setting: Configuration key of ``tokens``, for the log.

    Raises:
        TrainingError: A single sequence does not fit.
    """
    while True:
        try:
            return attempt(tokens), tokens
        except torch.OutOfMemoryError as error:
            if tokens <= longest:
                raise _hopeless(error, longest) from error
            why = str(error).partition(". ")[0]
        tokens = max(longest, tokens // 2)  # out here, where the error no longer holds the attempt's tensors
        empty_cache()
        advice = f"; set {setting} = {tokens} to avoid the retry" if setting else ""
        logger.warning("out of memory: retrying with at most %d tokens per micro-batch (%s)%s", tokens, why, advice)


def retry_unless_distributed(
    model: Any, attempt: Callable[[int], T], tokens: int, *, sequences: Sequence[TokenSequence], setting: str = ""
) -> tuple[T, int]:
    """Call ``attempt`` with :func:`retry_smaller`, but only once if ``model`` has several ranks.

    Other ranks would wait for a retry, and gathered shards are in an unknown state.
    """
    if not is_single_process(model):
        return attempt(tokens), tokens
    return retry_smaller(attempt, tokens, longest=longest_of(sequences), setting=setting)


def oom_retry(score: Callable[P, T]) -> Callable[P, T]:
    """Retry a pass over ``(model, sequences, *, tokens_per_microbatch, ...)`` that runs out of memory."""

    @functools.wraps(score)
    def fitted(*arguments: P.args, **settings: P.kwargs) -> T:
        sequences = cast(Sequence[TokenSequence], arguments[1])
        tokens = cast(int, settings["tokens_per_microbatch"])

        def attempt(smaller: int) -> T:
            settings["tokens_per_microbatch"] = smaller
            return score(*arguments, **settings)

        return retry_unless_distributed(arguments[0], attempt, tokens, sequences=sequences)[0]

    return fitted


def longest_of(sequences: Sequence[TokenSequence]) -> int:
    """Return the tokens of the longest sequence with its prompt, 0 if there is none."""
    return max((len(one.prompt_ids) + len(one.completion_ids) for one in sequences), default=0)


def empty_cache() -> None:
    """Return unused GPU memory to the driver, after collecting reference cycles."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _hopeless(error: torch.OutOfMemoryError, longest: int) -> TrainingError:
    return TrainingError(
        f"out of memory with a single sequence of {longest} tokens: {error}",
        fix="set hardware.gradient_checkpointing = true, shorten prompts or completions, train an adapter "
        "(lora.rank), or leave the engine less of the GPU (engine.gpus.gpu_memory_utilization)",
    )
