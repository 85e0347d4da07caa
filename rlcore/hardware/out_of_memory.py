"""Out of memory: the work is done again in smaller micro-batches, which gives the same result.

Weights of a loss are decided over a whole optimizer step before packing, and no sequence sees another, so a micro-batch
may be cut anywhere between sequences: sums come out in another order, and nothing else changes. What was done is
dropped and done anew, as if the smaller budget had been set from the start. An error inside a backward pass leaves a
part of its gradient behind, so an attempt has to begin with clear gradients.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch

from rlcore.distributed.sharded import is_single_process
from rlcore.errors import TrainingError
from rlcore.text.packing import TokenSequence

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)


def retry_smaller(attempt: Callable[[int], T], tokens: int, *, longest: int, setting: str = "") -> tuple[T, int]:
    """What ``attempt`` returns, and the tokens of a micro-batch with which it did not run out of memory.

    Args:
        attempt: does the work with so many tokens in a micro-batch; called again from the start, with half as many.
        tokens: what to begin with.
        longest: tokens of the longest sequence, which cannot be cut.
        setting: the path that sets ``tokens``, named in the log.

    Raises:
        TrainingError: even one sequence at a time does not fit.
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
        advice = f"; set {setting} = {tokens}, and this search is saved" if setting else ""
        logger.warning("out of memory: done again with at most %d tokens in a micro-batch (%s)%s", tokens, why, advice)


def oom_retry(score: Callable[P, T]) -> Callable[P, T]:
    """Let a pass over ``(model, sequences, *, tokens_per_microbatch, ...)`` be done again where it does not fit.

    A rank does not try again: others would wait for it, and shards that were gathered are in an unknown state.
    """

    @functools.wraps(score)
    def fitted(*arguments: P.args, **settings: P.kwargs) -> T:
        if not is_single_process(arguments[0]):
            return score(*arguments, **settings)
        sequences = cast(Sequence[TokenSequence], arguments[1])
        tokens = cast(int, settings["tokens_per_microbatch"])

        def attempt(smaller: int) -> T:
            settings["tokens_per_microbatch"] = smaller
            return score(*arguments, **settings)

        return retry_smaller(attempt, tokens, longest=longest_of(sequences))[0]

    return fitted


def longest_of(sequences: Sequence[TokenSequence]) -> int:
    """Tokens of the longest sequence with its prompt; 0 where there is none."""
    return max((len(one.prompt_ids) + len(one.completion_ids) for one in sequences), default=0)


def empty_cache() -> None:
    """Give back to the GPU's driver what no tensor uses any more, those that only a cycle keeps among it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _hopeless(error: torch.OutOfMemoryError, longest: int) -> TrainingError:
    return TrainingError(
        f"out of memory with a single sequence of {longest} tokens: {error}",
        fix="set hardware.gradient_checkpointing = true, shorten prompts or completions, train an adapter (lora.rank), "
        "or "
        "leave the engine less of the GPU (engine.gpus.gpu_memory_utilization)",
    )
