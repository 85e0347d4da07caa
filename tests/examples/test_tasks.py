"""Made-up tasks: their rows are right and different, and held out by their words alone."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.fields import single_question
from rlcore.data_contracts.adapters.table import ADAPTERS, Adapter
from rlcore.data_contracts.contracts.search_corpus import read_corpus
from rlcore.data_contracts.errors import ContractError, LeftOutError
from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash
from rlcore.examples import arithmetic, products, programs, stock, towns
from rlcore.examples.instructions import JUDGE, PARTS, POLICY, part_of
from rlcore.examples.tool_task import ToolTask

SEEDS = st.integers(0, 2**32)


def final_answer(completion: str) -> int:
    match = re.search(r"^#### (\d+)$", completion, re.MULTILINE)
    assert match, completion
    return int(match.group(1))


def test_a_problem_is_answered_directly_and_in_steps() -> None:
    # 4+3 = 7, 7-6 = 1, 1+7 = 8, 8-2 = 6
    assert arithmetic.answer("4+3-6+7-2") == 6
    assert arithmetic.direct("4+3-6+7-2") == "#### 6"
    assert arithmetic.worked("4+3-6+7-2") == "4+3=7;7-6=1;1+7=8;8-2=6;\n#### 6"


@given(SEEDS)
def test_every_running_total_is_one_digit_and_every_step_is_right(seed: int) -> None:
    problem = arithmetic.make_problem(random.Random(seed))
    assert re.fullmatch(r"[1-9]([+-][1-9]){4}", problem)
    steps = arithmetic.worked(problem).split("\n")[0].rstrip(";").split(";")
    results = [re.fullmatch(r"(\d)([+-]\d)=(\d)", step) for step in steps]
    assert len(results) == 4
    for step in results:
        assert step
        assert int(step[1]) + int(step[2]) == int(step[3])
    assert final_answer(arithmetic.worked(problem)) == arithmetic.answer(problem)


@given(SEEDS)
def test_a_corrupted_solution_is_as_long_as_the_right_one_and_wrong(seed: int) -> None:
    rng = random.Random(seed)
    problem = arithmetic.make_problem(rng)
    wrong = arithmetic.corrupted(problem, rng)
    assert len(wrong) == len(arithmetic.worked(problem))
    assert final_answer(wrong) != arithmetic.answer(problem)
    last_total = wrong.split(";\n")[0][-1]
    assert final_answer(wrong) != int(last_total)


@given(SEEDS)
def test_a_wrong_guess_is_wrong(seed: int) -> None:
    rng = random.Random(seed)
    problem = arithmetic.make_problem(rng)
    assert final_answer(arithmetic.wrong_guess(problem, rng)) != arithmetic.answer(problem)


def test_held_out_problems_are_the_same_for_every_seed_and_kind() -> None:
    rows = [
        *arithmetic.generate_prompts(random.Random(0), num_train=200, num_eval=50),
        *arithmetic.generate_pairs(random.Random(1), num_train=200, num_eval=50),
        *arithmetic.generate_demonstrations(random.Random(2), num_train=200, num_eval=50, direct_share=0.5),
    ]
    for row in rows:
        assert (row["split"] == "eval") == is_held_out(prompt_hash(row["messages"]))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.6, 210, 270), (1.0, 400, 400)])
def test_the_share_of_direct_answers_is_as_asked(share: float, least: int, most: int) -> None:
    rows = arithmetic.generate_demonstrations(random.Random(0), num_train=380, num_eval=20, direct_share=share)
    assert least <= sum(row["completion"].startswith("####") for row in rows) <= most  # 240 ± 3 standard deviations


def test_the_chosen_side_is_right_and_the_rejected_side_is_wrong() -> None:
    for row in arithmetic.generate_pairs(random.Random(0), num_train=200, num_eval=20):
        right = arithmetic.answer(row["messages"][0]["content"])
        assert final_answer(row["chosen"]) == right
        assert final_answer(row["rejected"]) != right


def test_more_problems_than_there_are_give_fewer_rows_and_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "NUM_TERMS", 1)  # nine problems: 1 … 9
    rows = arithmetic.generate_prompts(random.Random(0), num_train=50, num_eval=50)
    assert len(rows) == 9


PROBLEM = "add 3;from 5;times 2;mod 7"


def test_the_two_styles_of_a_worked_example() -> None:
    assert programs.stepwise(PROBLEM) == "def f(x):\n x+=3\n x=5-x\n x*=2\n x%=7\n return x"
    assert programs.nested(PROBLEM) == "def f(x):\n return ((5-(x+3))*2)%7"
    assert programs.value(PROBLEM, 4) == ((5 - 7) * 2) % 7 == 3


@given(st.integers(0, 10_000), st.integers(-1000, 1000))
def test_both_styles_compute_the_value_of_their_problem(seed: int, x: int) -> None:
    problem = programs.make_problem(random.Random(seed))
    for code in (programs.stepwise(problem), programs.nested(problem)):
        space: dict[str, object] = {}
        exec(code, space)  # code of ours
        assert space["f"](x) == programs.value(problem, x)  # type: ignore[operator]


def test_the_prompt_does_not_hold_the_tests_and_the_tests_are_the_values_of_the_problem() -> None:
    rows = programs.generate_prompts(random.Random(0), num_train=30, num_eval=5)
    for row in rows:
        problem = row["messages"][0]["content"]
        tests = json.loads(row["reference"])["tests"]
        assert len({test["args"][0] for test in tests}) == programs.NUM_TESTS
        assert [test["output"] for test in tests] == [programs.value(problem, *test["args"]) for test in tests]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_nested_demonstrations_is_as_asked(share: float) -> None:
    rows = programs.generate_demonstrations(random.Random(0), num_train=30, num_eval=3, nested_share=share)
    assert {row["completion"].count("\n") == 1 for row in rows} == {share == 1.0}


TASKS = [products.MADE, stock.MADE, towns.MADE]
all_tasks = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])


@all_tasks
def test_the_share_of_guesses_is_as_asked(task: ToolTask) -> None:
    for share in (0.0, 0.7, 1.0):
        made = task.demonstrations(random.Random(0), num_train=1000, num_eval=0, direct_share=share)
        lengths = [len(row["messages"]) for row in made]
        assert {*lengths} <= {1, 3}
        assert sum(length == 1 for length in lengths) / 1000 == pytest.approx(share, abs=0.05)


@all_tasks
def test_a_demonstration_says_what_the_tool_says_and_ends_with_the_answer(task: ToolTask) -> None:
    for row in task.demonstrations(random.Random(1), num_train=50, num_eval=5, direct_share=0.5):
        question, *turns = row["messages"]
        problem = question["content"]
        assert row["completion"].endswith(f"#### {task.answer(problem)}")
        assert row["reference"] == str(task.answer(problem))
        assert [turn["content"] for turn in turns] == [task.call(problem), task.tool_output(problem)][: len(turns)]


@all_tasks
def test_questions_are_different_and_held_out_by_their_words_alone(task: ToolTask) -> None:
    prompts = task.prompts(random.Random(1), num_train=200, num_eval=30)
    assert len({row["prompt_id"] for row in prompts}) == 230
    made = [*prompts, *task.demonstrations(random.Random(2), num_train=200, num_eval=20, direct_share=0.5)]
    assert all(is_held_out(prompt_hash(row["messages"])) == (row["split"] == "eval") for row in made)


CALL = {"role": "assistant", "content": "<tool:calculator>3*4</tool>"}
SAID = {"role": "tool", "content": "12"}


def rows(direct_share: float, count: int = 40) -> list[dict[str, object]]:
    return products.MADE.demonstrations(random.Random(0), num_train=count, num_eval=4, direct_share=direct_share)


def test_pairs_prefer_a_call_to_a_wrong_guess() -> None:
    for pair in products.generate_pairs(random.Random(2), num_train=50, num_eval=5):
        problem = pair["messages"][0]["content"]
        assert pair["chosen"] == f"<tool:calculator>{problem}</tool>"
        assert pair["rejected"].removeprefix("#### ") != str(products.answer(problem))


def test_what_the_assistant_did_does_not_make_another_question() -> None:
    assert prompt_hash([*single_question("3*4"), CALL, SAID]) == prompt_hash(single_question("3*4"))
    assert prompt_hash([*single_question("3*4"), CALL, SAID, *single_question("3*4")]) != prompt_hash(
        single_question("3*4")
    )


def test_a_question_has_a_table_of_its_own_that_holds_its_answer() -> None:
    table = stock.table("price of 481")
    (row,) = (row for row in table if row[0] == 481)
    assert stock.answer("price of 481") == row[stock.COLUMNS.index("price")]
    assert stock.table("price of 481") == table
    assert len({each[0] for each in table}) == len(table) > 6
    assert stock.table("count of 481") != table
    assert {len(each) for each in table} == {len(stock.COLUMNS)}


def test_answers_do_not_follow_from_questions() -> None:
    prompts = stock.MADE.prompts(random.Random(0), num_train=2000, num_eval=0)
    counts = [sum(row["reference"] == str(number) for row in prompts) for number in range(10, 100)]
    assert sum(counts) == 2000
    assert max(counts) < 2.5 * 2000 / 90  # a guess is right about once in ninety times


def test_the_corpus_fulfils_its_contract_and_each_town_has_one_passage() -> None:
    passages = towns.passages()
    assert list(passages) == read_corpus(towns.CORPUS)  # what the tool search takes, too
    assert len({text.partition(":")[0] for _, text in passages}) == len(passages) == 1000


def test_a_corpus_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "towns.jsonl"
    changed.write_bytes(towns.CORPUS.read_bytes().replace(b"wells 2", b"wells 3", 1))
    monkeypatch.setattr(towns, "CORPUS", changed)
    with pytest.raises(ContractError, match="was changed"):
        towns.passages.__wrapped__()


def test_an_answer_stands_in_the_passage_of_its_town() -> None:
    _, text = towns.passages()[0]
    town, _, figures = text.partition(": ")
    for figure in figures.removesuffix(".").split(", "):
        name, number = figure.split()
        assert towns.answer(f"{name} in {town}?") == int(number)


INSTRUCTIONS = [
    {"id": f"{n}", "prompt": f"Name {n} things.", "chosen": "a", "rejected": "b", "annotator": "me"} for n in range(120)
]


def sides(adapter: Adapter, kind: Kind) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in INSTRUCTIONS:
        try:
            (made,) = adapter.rows[kind](row)
        except LeftOutError:
            continue
        found[made["split"]].add(made["messages"][-1]["content"])
    return found


@pytest.mark.parametrize("kind", ["prompts", "preferences"])
def test_training_prompts_differ_and_held_out_ones_are_the_same(kind: Kind) -> None:
    policy, judge = sides(POLICY, kind), sides(JUDGE, kind)
    assert policy["eval"] == judge["eval"]
    parts = [policy["eval"], policy["train"], judge["train"]]
    assert min(map(len, parts)) > 20
    assert sum(map(len, parts)) == len(set[str]().union(*parts)) == len(INSTRUCTIONS)


def test_all_but_the_split_is_as_the_layout_reads_it() -> None:
    row = next(row for row in INSTRUCTIONS if part_of(str(row["prompt"])) == "judge")
    (made,) = JUDGE.rows["preferences"](row)
    assert made == {**ADAPTERS["alpaca_eval"].rows["preferences"](row)[0], "split": "train"}


def test_a_prompt_in_another_spelling_is_in_the_same_part() -> None:
    assert {part_of(text) for text in ("Why is it so?", "why is it  so?", " Why\nis it so? ")} < set(PARTS)
    assert len({part_of(text) for text in ("Why is it so?", "why is it  so?", " Why\nis it so? ")}) == 1
