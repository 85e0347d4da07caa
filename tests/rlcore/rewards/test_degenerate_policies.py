from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import reasoning_gym

from rlcore.config import RewardTerm
from rlcore.rewards import RewardResources, build_rewards
from rlcore.types import Message
from tests.rlcore.rewards.conftest import make_rollout
from tests.rlcore.sandbox.conftest import require_bubblewrap

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
YES_NO = [True, False, True, False]
SUITE = {"style": "call", "entry_point": "f", "tests": [{"args": [n], "output": v} for n, v in enumerate(YES_NO)]}
SUM = json.loads(json.dumps(reasoning_gym.create_dataset("chain_sum", seed=7, size=1)[0]))
NUMBER, EXPRESSION = r"What is $\gcd(48,36)$?", "Expand $(x+1)^2$."

# A column of the table: the reward, what is asked, the reference.
COLUMNS: Mapping[str, tuple[RewardTerm, str, str]] = {
    "`math`, 12": (RewardTerm(kind="math"), NUMBER, "12"),
    "`math`, x²+2x+1": (RewardTerm(kind="math"), EXPRESSION, "x^2+2x+1"),
    "`procedural`": (
        RewardTerm(kind="procedural"), SUM["question"], json.dumps({"dataset": "chain_sum", "entry": SUM}),
    ),
    "`format` boxed": (RewardTerm(kind="format", options={"style": "boxed"}), NUMBER, ""),
    "`format` think_answer": (RewardTerm(kind="format", options={"style": "think_answer"}), NUMBER, ""),
    "`language`": (RewardTerm(kind="language", options={"language": "en"}), NUMBER, ""),
    "`length`": (RewardTerm(kind="length", options={"limit": 512, "buffer": 128}), NUMBER, ""),
    "`repetition`": (RewardTerm(kind="repetition"), NUMBER, ""),
}  # fmt: skip
PROGRAMS: Mapping[str, tuple[RewardTerm, str, str]] = {
    f"`code` {credit}": (RewardTerm(kind="code", options={"credit": credit}), "", json.dumps(SUITE))
    for credit in ("all", "share")
}
# A row of the table: what a policy writes whatever it is asked.
POLICIES: Mapping[str, Callable[[str], str]] = {
    "nothing": lambda _: "",
    "blanks": lambda _: " \n ",
    "a zero-width character": lambda _: "\u200b",
    "an empty box": lambda _: r"\boxed{}",
    "a box of nothing to see": lambda _: "\\boxed{\\text{\u200b}}",
    "empty tags": lambda _: "<think> </think><answer>\u200b</answer>",
    "a number": lambda _: "0",
    "a number in a box": lambda _: r"\boxed{0}",
    "tags with a word": lambda _: "<think>so</think><answer>so</answer>",
    "the problem": lambda asked: asked,
    "the problem's formula in a box": lambda asked: rf"\boxed{{{''.join(re.findall(r'[$](.*)[$]', asked))}}}",
    "a word, many times": lambda _: "the " * 100,
    "a program that says yes": lambda _: "```python\ndef f(*x): return True\n```",
    "a program that ends the loop": lambda _: "```python\ndef f(*x): raise StopIteration\n```",
}


def documented() -> dict[str, dict[str, float]]:
    """The page's table: policy to reward to value."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text("utf-8").splitlines()
        if "|" in line
    ]
    head = next(place for place, row in enumerate(rows) if row[0] == "a policy that writes")
    names, found = rows[head][1:], {}
    for row in rows[head + 2 :]:
        if not set(policies := row[0].split("; ")) <= set(POLICIES):
            break
        values = {
            name: float(cell.replace("−", "-"))
            for head_cell, cell in zip(names, row[1:], strict=True)
            for name in head_cell.split("; ")
        }
        found |= dict.fromkeys(policies, values)
    return found


def earned(columns: Mapping[str, tuple[RewardTerm, str, str]]) -> dict[str, dict[str, float | None]]:
    table: dict[str, dict[str, float | None]] = {name: {} for name in POLICIES}
    for column, (term, asked, reference) in columns.items():
        rollouts = [make_rollout(write(asked), reference, num_tokens=8) for write in POLICIES.values()]
        turns = (Message(role="user", content=asked),)
        asking = [dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, messages=turns)) for one in rollouts]
        with build_rewards([term], resources=RewardResources()) as reward:
            for name, score in zip(POLICIES, reward(asking), strict=True):
                table[name][column] = None if score.value is None else round(score.value, 2)
    return table


def columns_of(table: Mapping[str, Mapping[str, float]], names: Mapping[str, object]) -> dict[str, dict[str, float]]:
    return {policy: {name: row[name] for name in names} for policy, row in table.items()}


def test_the_table_has_every_policy_and_reward() -> None:
    assert set(documented()) == set(POLICIES)
    assert set(documented()["nothing"]) == {*COLUMNS, *PROGRAMS}


def test_policies_that_solve_nothing_earn_what_the_page_says(record_property: Callable[[str, object], None]) -> None:
    record_property("hostile", len(POLICIES) * len(COLUMNS))
    assert earned(COLUMNS) == columns_of(documented(), COLUMNS)


def test_programs_that_solve_nothing_earn_what_the_page_says(record_property: Callable[[str, object], None]) -> None:
    require_bubblewrap()
    record_property("hostile", len(POLICIES) * len(PROGRAMS))
    assert earned(PROGRAMS) == columns_of(documented(), PROGRAMS)


@pytest.mark.parametrize("reward", ["`math`, 12", "`math`, x²+2x+1", "`code` all", "`code` share"])
def test_no_such_policy_earns_anything_by_a_verifier(reward: str) -> None:
    assert {row[reward] for row in documented().values()} == {0.0}


def test_nothing_to_see_earns_the_least_of_every_reward() -> None:
    table = documented()
    for name in ("nothing", "blanks", "a zero-width character"):
        assert all(value == min(row[reward] for row in table.values()) for reward, value in table[name].items()), name
