"""Pass rates of scored answers, and the prompts drawn by them; ``tests/flows/test_curriculum.py`` runs both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.difficulties import CONTRACT
from rlcore.data_contracts.errors import ContractError
from rlcore.errors import DataError
from rlcore.sampling.rejection import Candidate
from rlcore.tasks.kinds.difficulty.step import difficulties, metrics_of, summarize
from rlcore.tasks.kinds.rl.curriculum import curriculum_prompts
from rlcore.tasks.kinds.rl.kind import DrawConfig
from rlcore.tasks.store.storage import write_table
from rlcore.types import Message, Prompt


def prompts_of(*names: str) -> list[Prompt]:
    """Prompts as they are read: of several data sets, ids begin with the set's name."""
    several = len({name.partition("/")[0] for name in names}) > 1
    return [
        Prompt(
            prompt_id=name if several else name.partition("/")[2],
            messages=(Message(role="user", content=name),),
            token_ids=(1,),
            reference="2",
            task="sums",
            dataset=name.partition("/")[0],
        )
        for name in names
    ]


def answers(name: str, *values: float | None) -> list[Candidate]:
    return [
        Candidate(
            prompt_id=name,
            task="sums",
            sample_index=index,
            text="2",
            num_tokens=1,
            value=value,
            is_finished=True,
            is_usable=True,
        )
        for index, value in enumerate(values)
    ]


def test_a_pass_rate_counts_scored_answers_and_a_prompt_without_one_has_none() -> None:
    prompts = prompts_of("a/p", "b/p", "b/q")
    candidates = [*answers("a/p", 1.0, 0.5, None), *answers("b/p", None, None), *answers("b/q", 1.0, 1.0)]
    table = difficulties(candidates, prompts, threshold=0.99, confidence=0.95)
    require(table, CONTRACT)
    assert table[["dataset", "prompt_id", "answers", "passed", "reward"]].values.tolist() == [
        ["a", "p", 2, 1, 0.75],
        ["b", "q", 2, 2, 1.0],
    ]
    found = summarize(table, asked=3, seed=0, confidence=0.95)
    assert (found["unscored"], found["never"], found["always"]) == (1, 0, 1)
    assert found["histogram"] == [[0.5, 1], [1.0, 1]]
    assert metrics_of(found)["difficulty/always_solved"] == 0.5


def test_a_table_that_does_not_add_up_breaks_its_contract() -> None:
    table = difficulties(answers("p", 1.0, 0.0), prompts_of("a/p"), threshold=0.99, confidence=0.95)
    with pytest.raises(ContractError, match="pass_rate is not passed / answers"):
        require(table.assign(pass_rate=0.25), CONTRACT)
    with pytest.raises(ContractError, match="1 rows are there twice"):
        require(table.loc[[0, 0]].reset_index(drop=True), CONTRACT)


@pytest.fixture
def context(tmp_path: Any) -> Any:
    """A stage that draws from ``a`` and ``b``; of ``a`` three prompts were asked, of ``b`` one."""
    asked = prompts_of("a/never", "a/half", "a/always", "b/half")
    values = {"a/never": (0.0, 0.0), "a/half": (0.0, 1.0), "a/always": (1.0, 1.0), "b/half": (1.0, 0.0)}
    candidates = [one for name, each in values.items() for one in answers(name, *each)]
    write_table(difficulties(candidates, asked, threshold=0.99, confidence=0.95), tmp_path / "difficulty.parquet")
    logged: dict[str, float] = {}
    return SimpleNamespace(
        stage="grpo",
        seed=0,
        config=SimpleNamespace(stage=SimpleNamespace(prompts={"a": 1.0, "b": 1.0})),
        inputs={"difficulty": tmp_path},
        log=print,
        tracker=SimpleNamespace(log_metrics=lambda values, step: logged.update(values)),
        logged=logged,
    )


TRAIN = ("a/never", "a/half", "a/always", "a/unasked", "b/half", "b/unasked")


def test_each_data_set_keeps_the_prompts_of_the_band_and_none_that_was_not_asked(context: Any) -> None:
    draw = DrawConfig(pass_rates="difficulty", min_pass_rate=0.2, max_pass_rate=0.8)
    found = curriculum_prompts(context, draw, prompts_of(*TRAIN))
    assert [prompt.prompt_id for prompt in found] == ["a/half", "b/half"]
    assert context.logged == {"curriculum/prompts": 2.0, "curriculum/prompt_fraction": pytest.approx(1 / 3)}


def test_weights_count_within_a_data_set_so_that_shares_stay(context: Any) -> None:
    draw = DrawConfig(pass_rates="difficulty", weighting="learnability")
    found = [prompt.prompt_id for prompt in curriculum_prompts(context, draw, prompts_of(*TRAIN))]
    # of two answers one right: 4 / 20, none or both: 3 / 20
    assert found.count("a/half") in (1, 2)
    assert [found.count(name) for name in ("a/never", "a/always", "b/half", "a/unasked")] == [1, 1, 1, 0]
    assert found == [prompt.prompt_id for prompt in curriculum_prompts(context, draw, prompts_of(*TRAIN))]


def test_a_data_set_without_a_prompt_in_the_band_is_an_error_that_says_what_was_measured(context: Any) -> None:
    draw = DrawConfig(pass_rates="difficulty", min_pass_rate=0.9)
    with pytest.raises(DataError, match=r"no prompt of 'b' has a pass rate from 0\.9 to 1\.0: those of 1 prompts are"):
        curriculum_prompts(context, draw, prompts_of(*TRAIN))
