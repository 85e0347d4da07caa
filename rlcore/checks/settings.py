"""Checks of a run's settings before it starts, the same for presets and for the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from transformers import PretrainedConfig

from rlcore.algorithms.advantages import AdvantageInputs
from rlcore.algorithms.table import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.errors import ConfigError
from rlcore.models.architectures import max_positions
from rlcore.strict_config import build, config_error, to_dict
from rlcore.types import Prompt


def check_run(rl: RlConfig, prompts: Sequence[Prompt], model: PretrainedConfig, *, source: str) -> None:
    """Check settings and prompts of a run against each other and the model.

    Raises:
        ConfigError: Lists all errors, each with its key.
    """
    try:
        build(RlConfig, to_dict(rl), source=source)
    except ConfigError as error:
        raise ConfigError(error.what, where=source, fix="correct these settings; nothing was run") from error
    if errors := [*algorithm_errors(rl), *_prompt_errors(prompts)]:
        raise config_error(errors, source)
    positions = max_positions(model) or sys.maxsize
    check_context(positions, prompts, rl.sampling.max_new_tokens, key="sampling.max_new_tokens")


def algorithm_errors(rl: RlConfig) -> Iterator[str]:
    """Yield the errors of the algorithm's settings, each with its key within the run's settings."""
    try:
        algorithm = resolve_algorithm(rl)
    except ConfigError as error:
        yield f"{error.where or 'algorithm'}: {error.what}" + (f"; {error.fix}" if error.fix else "")
        return
    if rl.group_size > 1:
        return
    rewards, zeros = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.zeros(2, 1)
    alone = AdvantageInputs(
        rewards=rewards,
        group=torch.tensor([0, 1]),
        token_rewards=rewards[:, None],
        values=zeros,
        mask=torch.ones(2, 1, dtype=torch.bool),
        next_values=zeros[:, 0],
    )
    if not algorithm.advantage(alone).any():
        yield f"group_size = 1: {rl.algorithm} compares answers to one prompt, so one carries no signal; take 8"


def check_context(positions: int, prompts: Sequence[Prompt], max_new_tokens: int, *, key: str) -> None:
    """Check that the longest prompt and completion fit the model's ``positions``; ``key``: of ``max_new_tokens``.

    Raises:
        ConfigError: Names the prompt and the two limits.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    needed = len(longest.token_ids) + max_new_tokens
    if needed > positions:
        raise ConfigError(
            f"prompt {longest.prompt_id!r} has {len(longest.token_ids)} tokens and max_new_tokens is {max_new_tokens}: "
            f"{needed} in all, the model reads {positions}",
            where=key,
            fix="lower max_new_tokens, or leave long prompts out (max_tokens of a dataset)",
        )


def require_disjoint(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Check that no held-out prompt is trained on: by its tokens, or by its words, whatever their case and spaces.

    Raises:
        ConfigError: Names such a prompt.
    """
    tokens, words = {prompt.token_ids for prompt in held_out}, set(map(_words_of, held_out))
    both = [prompt for prompt in prompts if prompt.token_ids in tokens or _words_of(prompt) in words]
    if both:
        raise ConfigError(
            f"{len(both)} of {len(prompts)} training prompts are held-out prompts too, for example "
            f"{both[0].prompt_id!r}: {' '.join(each.content for each in both[0].messages)[:120]!r}",
            where="held_out",
            fix="remove them from prompts or from held_out.prompts: an evaluation on trained prompts proves nothing",
        )


def _words_of(prompt: Prompt) -> tuple[tuple[str, str], ...] | str:
    return tuple((each.role, " ".join(each.content.casefold().split())) for each in prompt.messages) or prompt.prompt_id


def _prompt_errors(prompts: Sequence[Prompt]) -> Iterator[str]:
    if not prompts:
        yield "prompts: there are none; make some with rlcore.chat_prompts(tokenizer, {question: reference answer})"
    elif other := next((each for each in prompts if not isinstance(each, Prompt)), None):
        yield (
            f"prompts: {other!r} is {type(other).__name__}, not rlcore.Prompt; "
            "make prompts with rlcore.chat_prompts(tokenizer, {question: reference answer})"
        )
