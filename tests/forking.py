"""An agent that leaves branches, on any engine: for runs whose episodes have several samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlcore.sampling.base import SamplingParams
from rlcore.types import FailedRollout, Prompt, Rollout

TITLE, ASK, OTHERWISE = (11, 12), (13, 14, 15), (16,)  # tokens that the agent sends


class ForkingSampler:
    """Plays every second completion of a group as an agent that calls four times; the others as one call.

        main      prompt | first answer, ASK, answer       the answer is the completion of the group
        branch    prompt, TITLE | title                    another system message
        branch    prompt | first answer, OTHERWISE, other  shares the first answer, which the main sample trains

    The titles and answers are the completions of the next samples of the group, and log-probabilities the engine's.
    ``trains_twice``: a fault, by which both samples train the shared answer.
    """

    def __init__(self, engine: Any, *, trains_twice: bool = False) -> None:
        self._engine, self._trains_twice = engine, trains_twice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        groups = self._engine.sample(prompts, params, seed=seed, places=places)
        return [[self._played(group, number, params) for number in range(len(group))] for group in groups]

    def _played(self, group: Sequence[Any], number: int, params: SamplingParams) -> Any:
        own = group[number]
        first, title, other = (group[(number + step) % len(group)] for step in (1, 2, 3))
        if number % 2 or first.finish_reason == "length":  # what was cut ends its sample
            return replace(own, num_sampled=len(own.completion_ids))
        answers = [(first.completion_ids, True), (ASK, False), (own.completion_ids, True)]
        others = [(first.completion_ids, self._trains_twice), (OTHERWISE, False), (other.completion_ids, True)]
        titled = replace(title, prompt=replace(own.prompt, token_ids=own.prompt.token_ids + TITLE))
        branches = (
            replace(self._continued(titled, [(title.completion_ids, True)], params), fork="another system message"),
            replace(self._continued(other, others, params), fork="message 2 of the history was changed"),
        )
        count = sum(len(each.completion_ids) for each in (first, own, title, other))
        return replace(self._continued(own, answers, params), branches=branches, num_sampled=count)

    def _continued(
        self, own: Rollout, pieces: Sequence[tuple[tuple[int, ...], bool]], params: SamplingParams
    ) -> Rollout:
        ids = tuple(token for piece, _ in pieces for token in piece)
        mask = tuple(is_own for piece, is_own in pieces for _ in piece)
        temperature = 1.0 if params.greedy else params.temperature
        logprobs = self._engine.logprobs(own.prompt.token_ids, ids, temperature=temperature)
        kept = tuple(value if is_own else 0.0 for value, is_own in zip(logprobs, mask, strict=True))
        return replace(own, completion_ids=ids, loss_mask=mask, sampler_logprobs=kept)
