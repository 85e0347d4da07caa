"""Contract rows to token sequences: the one place where text meets the tokenizer on its way into training."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.demonstrations import Demonstration, render_conversation
from rlcore.errors import ConfigError
from rlcore.tokenization import ChatTokenizer
from rlcore.training.preferences import TokenPair
from rlcore.types import Prompt
from tasks.steps.data import DemonstrationRow, PairRow, PromptRow


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


def tokenize_demonstrations(rows: Sequence[DemonstrationRow], tokenizer: ChatTokenizer) -> list[Demonstration]:
    """Token ids and loss masks: every turn of the assistant counts, up to and with its end-of-turn token."""
    return [render_conversation(tokenizer, row.messages, row.completion) for row in rows]


def tokenize_pairs(rows: Sequence[PairRow], tokenizer: ChatTokenizer, *, max_tokens: int) -> list[TokenPair]:
    """Both sides cut to the token budget. The gate has refused pairs that the cut makes equal."""
    pairs = []
    for row in rows:
        prompt_ids, chosen_ids = tokenizer.render_demonstration(row.messages, row.chosen)
        _, rejected_ids = tokenizer.render_demonstration(row.messages, row.rejected)
        room = max_tokens - len(prompt_ids)
        pairs.append(
            TokenPair(
                prompt_ids=prompt_ids,
                chosen_ids=chosen_ids[:room],
                rejected_ids=rejected_ids[:room],
                set_id=row.set_id,
                margin=row.margin,
                probability=row.probability,
                weight=row.weight,
            )
        )
    return pairs


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
