"""Engines of tests: their answers are functions of the prompt, and they can wait or fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from rlcore.sampling.base import SamplingParams
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.waiting import LONG


def completion(
    prompt: Prompt, ids: Sequence[int], text: str, *, logprobs: Sequence[float] = (), version: int = 0, is_cut: bool
) -> Rollout:
    return Rollout(
        prompt=prompt,
        completion_ids=tuple(ids),
        sampler_logprobs=tuple(logprobs) or (-1.0,) * len(ids),
        loss_mask=(True,) * len(ids),
        policy_version=version,
        finish_reason="length" if is_cut else "stop",
        text=text,
    )


class _Engine(ScriptedSampler):
    """Engine that samples after ``before``, and keeps what it was asked and what it made."""

    def __init__(self, tokenizer: ChatTokenizer, *, before: Callable[[], object] = lambda: None) -> None:
        super().__init__({}, tokenizer, policy_version=3)
        self._tokenizer, self._before = tokenizer, before
        self.batches: list[int] = []
        self.params: list[SamplingParams] = []
        self.made: list[Rollout] = []

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        self._before()
        self.batches.append(len(prompts))
        self.params.append(params)
        found = [self._answered(prompt, place, params) for prompt, place in zip(prompts, places or (), strict=True)]
        self.made += found
        return [[each] for each in found]

    def _answered(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
        raise NotImplementedError


class Parrot(_Engine):
    """Engine that answers every request with ``answer`` of the prompt's text."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        answer: Callable[[str], str] = lambda _: "#### 7",
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(tokenizer, before=before)
        self._answer = answer

    def _answered(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
        text = self._answer(self._tokenizer.decode(prompt.token_ids))
        whole = (*self._tokenizer.encode(text), *self._tokenizer.end_of_turn)
        ids = whole[: params.max_new_tokens]
        return completion(prompt, ids, self._tokenizer.decode(ids), version=self.policy_version, is_cut=ids != whole)


class RandomSampler(_Engine):
    """Engine of random tokens that depend on the place alone; some answers end, others are cut."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, end_rate: float = 0.3, before: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(tokenizer, before=before)
        self._end_rate = end_rate
        self._others = [number for number in range(tokenizer.vocabulary_size) if number not in tokenizer.eos_ids]

    def _answered(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
        drawn, ids = random.Random(place), []
        while len(ids) < params.max_new_tokens and (not ids or ids[-1] not in self._tokenizer.eos_ids):
            ends = drawn.random() < self._end_rate
            ids.append(self._tokenizer.eos_ids[0] if ends else drawn.choice(self._others))
        logprobs, is_cut = [-drawn.random() - 0.1 for _ in ids], ids[-1] not in self._tokenizer.eos_ids
        return completion(prompt, ids, self._tokenizer.decode(ids), logprobs=logprobs, is_cut=is_cut)


class Gated(RandomSampler):
    """Engine that answers when it may."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer, end_rate=0.2, before=self._wait)
        self.may_answer, self.has_begun = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.has_begun.set()
        assert self.may_answer.wait(LONG)
