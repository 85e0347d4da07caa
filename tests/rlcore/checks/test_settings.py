"""Checks of a run's settings: each with the words that a preset gets for the same mistake."""

from __future__ import annotations

import pytest

from rlcore.checks.settings import algorithm_errors, check_context, require_disjoint
from rlcore.errors import ConfigError
from rlcore.types import Message, Prompt
from tests import strategies


def prompt(name: str, num_tokens: int) -> Prompt:
    return Prompt(
        prompt_id=name,
        messages=(Message(role="user", content=name),),
        token_ids=tuple(range(num_tokens)),
        reference="",
        task="",
    )


def test_the_longest_prompt_must_leave_room_for_a_whole_completion() -> None:
    prompts = [prompt("short", 3), prompt("long", 30), prompt("other", 4)]
    check_context(38, prompts, 8, key="stages.grpo.sampling.max_new_tokens")
    with pytest.raises(ConfigError, match=r"'long' .*38 in all, the model reads 37") as caught:
        check_context(37, prompts, 8, key="stages.grpo.sampling.max_new_tokens")
    assert "stages.grpo.sampling.max_new_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "group_size", "expected"),
    [
        ("grpo", 1, "group_size = 1: grpo compares answers to one prompt, so one carries no signal; take 8"),
        ("grpo", 2, ""),
        ("ppo", 1, ""),  # its critic is the baseline
        ("grpoo", 8, "algorithm: unknown algorithm 'grpoo'; choose one of "),
    ],
)
def test_a_group_of_one_is_refused_where_the_group_is_the_baseline(
    algorithm: str, group_size: int, expected: str
) -> None:
    found = list(algorithm_errors(strategies.rl_config(algorithm, group_size=group_size)))
    assert len(found) == bool(expected) and "".join(found).startswith(expected)


@pytest.mark.parametrize(
    ("held_out", "is_refused"),
    [
        (prompt("What  IS 3 + 4?", 9), True),  # the same words
        (prompt("other words", 5), True),  # the same tokens
        (prompt("What is 3 + 5?", 9), False),
    ],
)
def test_held_out_prompts_are_not_trained_on(held_out: Prompt, is_refused: bool) -> None:
    trained = [prompt("What is 3 + 4?", 5), prompt("another", 6)]
    if not is_refused:
        require_disjoint(trained, [held_out])
        return
    with pytest.raises(
        ConfigError, match=r"1 of 2 training prompts are held-out prompts too, for example 'What is 3"
    ) as caught:
        require_disjoint(trained, [held_out])
    assert "remove them from prompts or from held_out.prompts" in str(caught.value)
