"""Rewards are built from their settings; each mistake is refused by its path; those of the pages can be built."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import RewardTerm
from rlcore.errors import ConfigError, RewardError
from rlcore.rewards import REWARDS, RewardResources, build_rewards
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.table import reward_errors
from rlcore.rewards.user_function import FunctionReward
from rlcore.strict_config import build
from tests.rlcore.rewards.conftest import make_rollout

MODULE = "reward_functions_of_a_user"

FUNCTIONS = """
def brevity(rollouts):
    return [None if not r.text else 1.0 / len(r.text) for r in rollouts]

def bounded(rollouts, *, limit, low=0.0):
    return [1.0 if len(r.text) <= limit else low for r in rollouts]

async def slow(rollouts, *, bonus=0.0):
    import asyncio
    await asyncio.gather(*(asyncio.sleep(0.01) for r in rollouts))
    return [len(r.text) + bonus for r in rollouts]

import functools
partly = functools.partial(brevity)
not_a_function = 3
"""

NOTHING = RewardResources()
ROOT = Path(__file__).parents[3]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / f"{MODULE}.py").write_text(FUNCTIONS, encoding="utf-8")
    (tmp_path / "lacking_module.py").write_text("import absent_pack", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return MODULE


def test_a_run_mixes_its_terms() -> None:
    terms = [
        RewardTerm(kind="math"),
        RewardTerm(kind="format", weight=0.1, options={"style": "boxed"}),
        RewardTerm(kind="length", weight=0.5, options={"limit": 4, "buffer": 2}),
    ]
    with build_rewards(terms, resources=NOTHING) as reward:
        # 1.0 + 0.1 * 1.0 + 0.5 * -0.5
        score = reward([make_rollout(r"\boxed{7}", "7", num_tokens=3)])[0]
    assert score.value == pytest.approx(0.85)
    assert score.terms == {"math": 1.0, "format": 1.0, "length": -0.5}


CHAIN_SUM = {"dataset": "chain_sum", "entry": {"question": "3 + 4 = ?", "answer": "7", "metadata": {}}}

ADD = {
    "style": "call",
    "entry_point": "add",
    "tests": [{"args": [1, 2], "output": 3}],
    "solution": "def add(a, b):\n    return a + b",
}


@pytest.mark.filterwarnings("ignore:.*UNPROTECTED:RuntimeWarning")
@pytest.mark.parametrize(
    ("term", "reference", "answer"),
    [
        (RewardTerm(kind="math"), "7", r"\boxed{7}"),
        (RewardTerm(kind="procedural"), json.dumps(CHAIN_SUM), "<answer>7</answer>"),
        (
            RewardTerm(kind="code", options={"backend": "unprotected"}),
            json.dumps(ADD),
            f"\n```python\n{ADD['solution']}\n```\n",
        ),
        (RewardTerm(kind="format", options={"style": "boxed"}), "", r"\boxed{7}"),
        (RewardTerm(kind="format", options={"style": "answer_tag"}), "", "<answer>7</answer>"),
        (RewardTerm(kind="format", options={"style": "hashes"}), "", "\n#### 7"),
    ],
)
def test_no_reward_takes_thinking_that_was_cut_for_an_answer(term: RewardTerm, reference: str, answer: str) -> None:
    cut, whole = make_rollout(answer, reference), make_rollout(f"{answer}</think>{answer}", reference)
    with build_rewards([term], resources=RewardResources(prefill="<think>\n")) as reward:
        assert [score.value for score in reward([cut, whole])] == [0.0, 1.0]
    with build_rewards([term], resources=NOTHING) as reward:  # the template writes no <think>
        assert [score.value for score in reward([cut, whole])] == [1.0, 1.0]


def test_the_reward_model_comes_from_the_resources() -> None:
    resources = RewardResources(score_tokens={"": lambda items, calibrated: torch.full((1, len(items)), 3.0)})
    terms = [RewardTerm(kind="reward_model", weight=2.0, options={"shift": 1})]
    assert build_rewards(terms, resources=resources)([make_rollout("")])[0].value == 4.0


def test_a_users_function_is_a_reward_with_its_own_name(user_module: str) -> None:
    reward = build_rewards([RewardTerm(kind=f"{user_module}:brevity", weight=2.0)], resources=NOTHING)
    first, second = reward([make_rollout("abcd"), make_rollout("")])
    assert (first.value, first.terms) == (0.5, {"brevity": 0.25})
    assert (second.value, second.error) == (None, "brevity: the function returned None")


def test_an_async_function_is_awaited_also_inside_a_running_loop(user_module: str) -> None:
    reward = build_rewards([RewardTerm(kind=f"{user_module}:slow", options={"bonus": 0.5})], resources=NOTHING)
    rollouts = [make_rollout("a"), make_rollout("ab")]

    async def inside() -> list[float | None]:
        return [score.value for score in reward(rollouts)]

    assert [score.value for score in reward(rollouts)] == asyncio.run(inside()) == [1.5, 2.5]


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        ([True, False], [1.0, 0.0]), ([np.float32(0.5), np.bool_(True)], [0.5, 1.0]), (np.array([2, 0]), [2.0, 0.0]),
        (torch.tensor([2, 0]), [2.0, 0.0]), ([[np.float64(0.25)], np.ones(1)], [0.25, 1.0]),
    ],
)  # fmt: skip
def test_a_value_may_be_a_boolean_or_a_number_of_numpy_or_torch(returned: Any, values: list[float]) -> None:
    scores = FunctionReward(lambda _: returned, "own")([make_rollout("")] * 2)
    assert [score.value for score in scores] == values
    assert {type(score.value) for score in scores} == {float}


@pytest.mark.parametrize("returned", [[1.0], ["good", "good"], 1.0])
def test_a_users_function_has_to_return_one_number_each(returned: Any) -> None:
    with pytest.raises(RewardError, match=rf"own returned .*\n  where: .*{Path(__file__).name}"):
        FunctionReward(lambda _: returned, "own")([make_rollout("")] * 2)


def fails(rollouts: Any) -> list[float]:
    return [1.0 / len(one.text) for one in rollouts]


def decodes(rollouts: Any) -> list[float]:
    return [json.loads(one.text) for one in rollouts]


async def decodes_later(rollouts: Any) -> list[float]:
    return decodes(rollouts)


IN_LIBRARY = "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (in raw_decode, "


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (fails, "own raised ZeroDivisionError: float division by zero"),
        (decodes, IN_LIBRARY),
        (decodes_later, IN_LIBRARY),
    ],
)
def test_an_exception_stops_the_run_and_names_the_users_line_and_the_rollout(function: Any, what: str) -> None:
    with pytest.raises(RewardError) as caught:
        FunctionReward(function, "own")([make_rollout("1"), make_rollout("")])
    line = (fails if function is fails else decodes).__code__.co_firstlineno + 1
    assert f"{__file__}:{line}, rollout of prompt 'p': ''" in caught.value.where
    assert what in caught.value.what


def test_a_gate_comes_from_the_preset() -> None:
    terms = [
        RewardTerm(kind="format", weight=0.5, gate=1.0, below_gate=-0.25, options={"style": "boxed"}),
        RewardTerm(kind="math"),
    ]
    with build_rewards(terms, resources=NOTHING) as reward:
        scores = reward([make_rollout(r"\boxed{7}", "7"), make_rollout("7", "7")])
    assert [score.value for score in scores] == [1.5, -0.25]
    assert scores[1].terms == {"format": 0.0, "math": 1.0}


def test_a_users_function_may_reward_each_turn() -> None:
    two_turns = dataclasses.replace(make_rollout("a", num_tokens=3), loss_mask=(True, False, True))
    own = FunctionReward(lambda rollouts: [[0.5] * 2 for _ in rollouts], "own")
    plain = FunctionReward(lambda rollouts: [1.0 for _ in rollouts], "plain")
    (score,) = WeightedReward([WeightedTerm(own, 2.0), WeightedTerm(plain, 1.0)])([two_turns])
    # 2 * (0.5 + 0.5) + 1; the 1 is of no turn in particular, so it comes with what is left at the end.
    assert (score.value, score.terms, score.turn_rewards) == (3.0, {"own": 1.0, "plain": 1.0}, (1.0, 1.0))
    with pytest.raises(RewardError, match="own returned 2 rewards for a rollout of 1 turns"):
        own([make_rollout("")])


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (RewardTerm(kind="maths"), r"unknown reward 'maths'\n  where: rewards.1.kind\n.*did you mean 'math'"),
        (RewardTerm(kind="quantum"), r"choose one of math, procedural"),
        (RewardTerm(kind="math", options={"last_numbr": True}), r"did you mean last_number\?\n.*rewards.1.options"),
        (RewardTerm(kind="math", options={"num_workers": 0}), r"num_workers = 0: must be at least 1"),
        (RewardTerm(kind="math", options={"last_number": 1}), r"last_number = 1: must be a boolean"),
        (RewardTerm(kind="format"), r"style: required, but missing"),
        (RewardTerm(kind="format", options={"style": "yaml"}), r"style = 'yaml': must be one of 'boxed'"),
        (RewardTerm(kind="length", options={"limit": 4, "buffer": 5}), r"buffer 5 is longer than limit 4"),
        (RewardTerm(kind="language", options={"language": "tlh"}), r"must be one of prompt, en, de"),
        (RewardTerm(kind="reward_model"), r"the reward model '' does not exist"),
        (RewardTerm(kind="no.such.module:f"), r"cannot import the function 'no.such.module:f'"),
        (
            RewardTerm(kind="lacking_module:f"),
            r"No module named 'absent_pack'.*install the package of 'absent_pack'",
        ),
        (RewardTerm(kind=":f"), r"cannot import"),
        (RewardTerm(kind=f"{MODULE}:absent"), r"cannot import .*absent"),
        (RewardTerm(kind=f"{MODULE}:not_a_function"), r"is not a function"),
        (
            RewardTerm(kind="math:sqrt"),
            r"'math:sqrt' is Python's own function, and no reward.*def reward\(rollouts",
        ),
        (RewardTerm(kind="statistics:mean"), r"is Python's own function"),
        (
            RewardTerm(kind=f"{MODULE}:brevity", options={"a": 1}),
            r"unexpected keyword argument 'a'.*brevity\(rollouts\)",
        ),
        (RewardTerm(kind=f"{MODULE}:bounded"), r"missing a required .*argument: 'limit'\n  where: rewards.1.options"),
        (RewardTerm(kind=f"{MODULE}:bounded", options={"rollouts": 1}), r"multiple values for argument 'rollouts'"),
        (RewardTerm(kind="length", options={"limit": 8, "buffer": 4}), r"'length' is named twice for the same data"),
    ],
)
def test_a_mistake_is_refused_with_its_path(user_module: str, term: RewardTerm, message: str) -> None:
    good = RewardTerm(kind="length", options={"limit": 8, "buffer": 4})
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        build_rewards([good, term], resources=NOTHING)


def test_a_users_function_with_bound_arguments_is_not_pythons_own(user_module: str) -> None:
    assert reward_errors([RewardTerm(kind=f"{user_module}:partly")], "rewards") == []


def test_a_run_without_a_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one reward"):
        build_rewards([], resources=NOTHING)


def test_the_grader_processes_do_not_load_torch() -> None:
    """They are limited to 2 GiB of address space, of which torch alone may take more."""
    program = "import sys, rlcore.rewards.grader_process, rlcore.rewards.math_verifier; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


RESOURCES = RewardResources(score_tokens={"reward_model": lambda items, *, calibrated: torch.zeros(1, len(items))})


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def terms(page: str) -> list[list[RewardTerm]]:
    documents = [tomllib.loads(block) for block in blocks(page, "toml")]
    found = [document.get("stages", {}).get("grpo", document).get("rewards", []) for document in documents]
    return [[build(RewardTerm, term) for term in rewards] for rewards in found if rewards]


@pytest.mark.parametrize("page", ["README.md", "docs/rewards.md"])
def test_every_reward_of_a_page_can_be_built_and_its_function_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in blocks(page, "python") if "def brief" in block]
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    for rewards in terms(page):
        build_rewards(rewards, resources=RESOURCES).close()
    (own,) = [rewards for rewards in terms(page) if rewards[-1].kind == "my_rewards:brief"]
    with build_rewards(own, resources=RESOURCES) as reward:
        scores = reward([make_rollout("7", "7"), make_rollout("so " * 99 + "7", "7")])
    assert [score.value for score in scores] == [1.2, 1.0]


def test_the_page_has_every_reward_with_every_option() -> None:
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    shown = {term.kind for rewards in terms("docs/rewards.md") for term in rewards}
    assert set(REWARDS) <= shown
    absent = [
        f"{kind}.{name}"
        for kind, entry in REWARDS.items()
        for name in entry.options.__dataclass_fields__
        if not re.search(rf"\b{name}\b", text)
    ]
    assert absent == []
