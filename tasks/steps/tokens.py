"""Prompts as token sequences, and whether the model has room for them and their completions."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.errors import ConfigError
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tasks.steps.rows import PromptRow


def tokenize_prompts(rows: Sequence[PromptRow], tokenizer: ChatTokenizer) -> list[Prompt]:
    """Rows with the token ids that the policy will see, generation prompt included."""
    return [
        Prompt(
            prompt_id=row.prompt_id,
            messages=row.messages,
            token_ids=tokenizer.render_prompt(row.messages),
            reference=row.reference,
            task=row.task,
        )
        for row in rows
    ]


def check_context(positions: int, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse a run whose longest prompt leaves no room for a whole completion in a model that reads ``positions``.

    Raises:
        ConfigError: names the prompt and the two limits.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    needed = len(longest.token_ids) + max_new_tokens
    if needed > positions:
        raise ConfigError(
            f"prompt {longest.prompt_id!r} has {len(longest.token_ids)} tokens and max_new_tokens is {max_new_tokens}: "
            f"{needed} in all, the model reads {positions}",
            where="sampling.max_new_tokens",
            fix="lower max_new_tokens, or prompts.max_tokens so that the gate leaves long prompts out",
        )
