"""Rollout engine that replays scripted completions, for dry runs and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.errors import SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, FinishReason, Prompt, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedCompletion:
    """Completion as an engine reports it; if it stopped, its last token is EOS."""

    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish_reason: FinishReason = "stop"

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.sampler_logprobs):
            raise SamplingError(
                f"a scripted completion has {len(self.completion_ids)} tokens "
                f"and {len(self.sampler_logprobs)} log-probabilities"
            )


class ScriptedSampler:
    """Engine that replays ``script[prompt_id]``; see :class:`rlcore.sampling.base.Sampler`.

    A longer group repeats the script; greedy sampling takes its first completion. A prompt without one gives failed
    rollouts. With a ``scorer`` engine, the log-probabilities are the scorer's, and weight syncs can be verified.
    """

    def __init__(
        self,
        script: Mapping[str, Sequence[ScriptedCompletion]],
        tokenizer: ChatTokenizer,
        *,
        policy_version: int = 0,
        scorer: Sampler | None = None,
    ) -> None:
        self.policy_version = policy_version
        self._script = {prompt_id: tuple(completions) for prompt_id, completions in script.items()}
        self._tokenizer, self._scorer = tokenizer, scorer

    @classmethod
    def from_texts(
        cls,
        texts: Mapping[str, Sequence[str]],
        tokenizer: ChatTokenizer,
        *,
        policy_version: int = 0,
        scorer: Sampler | None = None,
    ) -> ScriptedSampler:
        """Build a script from texts, each ended by EOS. Every token has the log-probability of a uniform policy."""
        logprob = -math.log(tokenizer.vocabulary_size)
        script = {}
        for prompt_id, answers in texts.items():
            ids = [tokenizer.encode(answer) + tokenizer.end_of_turn for answer in answers]
            script[prompt_id] = [
                ScriptedCompletion(completion_ids=tokens, sampler_logprobs=(logprob,) * len(tokens)) for tokens in ids
            ]
        return cls(script, tokenizer, policy_version=policy_version, scorer=scorer)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return the script's completions, truncated to ``max_new_tokens``. Seed and indices have no effect."""
        return [
            [self._rollout(prompt, 0 if params.greedy else number, params) for number in range(params.num_samples)]
            for prompt in prompts
        ]

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Set the version and load the scorer's weights."""
        if self._scorer:
            self._scorer.load_weights(state, policy_version=policy_version)
        self.policy_version = policy_version

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the scorer's log-probabilities, or else those of the script.

        Raises:
            SamplingError: The completion is not in the script.
        """
        if self._scorer:
            return self._scorer.logprobs(prompt_ids, completion_ids, temperature=temperature)
        for completions in self._script.values():
            for completion in completions:
                if completion.completion_ids == tuple(completion_ids):
                    return list(completion.sampler_logprobs)
        raise SamplingError("the completion is not in the script", fix="use a completion of the script")

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """Return the scorer's result; None without a scorer, which has no weights."""
        return self._scorer.differing_parts(state) if self._scorer else None

    def _rollout(self, prompt: Prompt, number: int, params: SamplingParams) -> Rollout | FailedRollout:
        completions = self._script.get(prompt.prompt_id)
        if not completions:
            return FailedRollout(prompt=prompt, reason="the script has no completion for this prompt")
        completion = completions[number % len(completions)]
        token_ids = completion.completion_ids[: params.max_new_tokens]
        is_cut = len(token_ids) < len(completion.completion_ids)
        logprobs = completion.sampler_logprobs[: params.max_new_tokens]
        if self._scorer:
            temperature = 1.0 if params.greedy else params.temperature
            logprobs = tuple(self._scorer.logprobs(prompt.token_ids, token_ids, temperature=temperature))
        return Rollout(
            prompt=prompt,
            completion_ids=token_ids,
            sampler_logprobs=logprobs,
            loss_mask=(True,) * len(token_ids),
            policy_version=self.policy_version,
            finish_reason="length" if is_cut else completion.finish_reason,
            text=self._tokenizer.decode(token_ids),
        )
