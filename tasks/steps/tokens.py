"""Prompts as token sequences, and whether the model has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlcore.errors import ConfigError
from rlcore.tasks.steps.base import StageContext, prepare_stage_name
from rlcore.tasks.steps.rows import PromptRow, read_prompts
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt


def tokenize_prompts(
    rows: Sequence[PromptRow], tokenizer: ChatTokenizer, *, dataset: str = "", is_one_of_several: bool = False
) -> list[Prompt]:
    """Rows of a data set with the token ids that the policy will see, generation prompt included.

    Two data sets may use an id for different prompts, so of several each id begins with the data set's name.
    """
    scope = f"{dataset}/" if is_one_of_several else ""
    return [
        Prompt(
            prompt_id=scope + row.prompt_id,
            messages=row.messages,
            token_ids=tokenizer.render_prompt(row.messages),
            reference=row.reference,
            task=row.task,
            dataset=dataset,
        )
        for row in rows
    ]


def read_prompt_sets(
    context: StageContext,
    names: Sequence[str],
    split: Literal["train", "eval"],
    tokenizer: ChatTokenizer,
    *,
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts of a split of each data set, at most ``limit`` of each; of several, ids begin with the set's name."""
    found: list[Prompt] = []
    for name in names:
        rows = read_prompts(context.inputs[prepare_stage_name(name)] / f"{split}.parquet")[:limit]
        found += tokenize_prompts(rows, tokenizer, dataset=name, is_one_of_several=len(names) > 1)
    return found


def id_in_dataset(prompt: Prompt, *, is_one_of_several: bool) -> str:
    """The id that a prompt has in its data set, which :func:`tokenize_prompts` puts behind the set's name."""
    return prompt.prompt_id.removeprefix(f"{prompt.dataset}/") if is_one_of_several else prompt.prompt_id


def check_context(positions: int, prompts: Sequence[Prompt], max_new_tokens: int, *, key: str) -> None:
    """Refuse a run whose longest prompt leaves no room for a whole completion in a model that reads ``positions``.

    ``key``: of the setting ``max_new_tokens``.

    Raises:
        ConfigError: names the prompt and the two limits.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    needed = len(longest.token_ids) + max_new_tokens
    if needed > positions:
        raise ConfigError(
            f"prompt {longest.prompt_id!r} has {len(longest.token_ids)} tokens and max_new_tokens is {max_new_tokens}: "
            f"{needed} in all, the model reads {positions}",
            where=key,
            fix="lower max_new_tokens, or max_tokens of the data set so that the gate leaves long prompts out",
        )
