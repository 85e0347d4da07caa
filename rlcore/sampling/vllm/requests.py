"""Requests to vLLM and its answers as plain values: sampling settings, completions, prompt scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcore.errors import SamplingError
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout

_NO_NUMBER = -9999.0  # vLLM's value for a log-probability of NaN


def settings_of(params: SamplingParams, seed: int, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the sampling settings of one completion. Only rlcore's stop tokens end it, not the checkpoint's."""
    return {
        "temperature": 0.0 if params.greedy else params.temperature,
        "max_tokens": params.max_new_tokens,
        "seed": seed,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(tokenizer.eos_ids),
    }


def rejection_reason(prompt: Prompt, max_new_tokens: int, *, limit: int) -> str:
    """Return why an engine with ``limit`` positions cannot complete a prompt; empty if it can."""
    needed = len(prompt.token_ids) + max_new_tokens
    if not prompt.token_ids:
        return "the prompt has no tokens"
    return f"prompt and completion need {needed} positions, the engine has {limit}" if needed > limit else ""


def rollout_of(prompt: Prompt, choice: Mapping[str, Any], tokenizer: ChatTokenizer) -> Rollout:
    """Return the rollout of a completion. If weights changed during sampling, it has the oldest version.

    Raises:
        SamplingError: A log-probability is not a number.
    """
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    version = min(int(span["version"]) for span in choice["weight_versions"])
    if not all(math.isfinite(value) and value > _NO_NUMBER for value in logprobs):
        raise SamplingError(
            f"the model computes NaN or infinity on prompt {prompt.prompt_id!r}",
            where=f"policy version {version}",
            fix="restore an earlier checkpoint and lower the learning rate",
        )
    return Rollout(
        prompt=prompt,
        completion_ids=tokens,
        sampler_logprobs=logprobs,
        loss_mask=(True,) * len(tokens),
        policy_version=version,
        finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        text=tokenizer.decode(tokens),
    )


def rescored(rows: Sequence[Mapping[str, Any]], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
    """Return the log-probability of each token at ``temperature`` from those at temperature 1.

    ``rows`` are the scores by token id. They cover the whole vocabulary if the temperature is not 1, because then ``log
    p_T(x) = log p(x) / T - log sum_v p(v)^(1 / T)``.
    """
    if temperature == 1.0:
        return [row[str(token)]["logprob"] for token, row in zip(completion_ids, rows, strict=True)]
    tables = [{int(token): entry["logprob"] / temperature for token, entry in row.items()} for row in rows]
    return [
        table[token] - torch.tensor(list(table.values()), dtype=torch.float64).logsumexp(0).item()
        for token, table in zip(completion_ids, tables, strict=True)
    ]
