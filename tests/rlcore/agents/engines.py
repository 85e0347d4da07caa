"""Engines of tests: their answers are functions of the prompt, and they can wait or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.sampling.base import SamplingParams
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout


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


class Parrot(ScriptedSampler):
    """Engine that answers every request with ``answer`` of the prompt's text, after ``before``."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        answer: Callable[[str], str] = lambda _: "#### 7",
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__({}, tokenizer, policy_version=3)
        self._tokenizer, self._answer, self._before = tokenizer, answer, before
        self.batches: list[int] = []
        self.params: list[SamplingParams] = []

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        self.batches.append(len(prompts))
        self.params.append(params)
        self._before()
        return [[self._answered(prompt, params)] for prompt in prompts]

    def _answered(self, prompt: Prompt, params: SamplingParams) -> Rollout:
        text = self._answer(self._tokenizer.decode(prompt.token_ids))
        whole = (*self._tokenizer.encode(text), *self._tokenizer.end_of_turn)
        ids = whole[: params.max_new_tokens]
        return completion(prompt, ids, self._tokenizer.decode(ids), version=self.policy_version, is_cut=ids != whole)
