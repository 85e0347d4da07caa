"""The flow promote on models that copy a right or a wrong answer: promotion, refusal, roll-back, and again."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlcore.errors import ConfigError, DataError, PromotionError
from rlcore.flows.cli.app import main
from rlcore.flows.flows import promote, rollback
from rlcore.tasks.presets.settings import OwnLimits, PromotionConfig
from rlcore.tasks.promotion.champion import last_move
from rlcore.tasks.promotion.step import (
    compared,
    compared_by_wins,
    comparison_digest,
    greedy_rows,
    judge_check,
    limits_of,
    prompt_set,
    require_tasks,
    wins_of,
)
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_table
from rlcore.tasks.tracking.registry import CANDIDATE, CHALLENGER, CHAMPION, PREVIOUS, find_version
from rlcore.tasks.tracking.runs import open_tracker
from tests.flows.conftest import ran
from tests.flows.micro import ONE_LAYER
from tests.flows.retraining import write_files
from tests.ssh_keys import allowed, ask_for_approvals, make_key

NAME = "tiny-sft"
SMALL = (
    "hardware.num_threads=1",
    *ONE_LAYER,
    "stages.sft.optim.warmup_steps=5",
    "stages.sft.learning_rate=5e-3",
    "evaluation.num_problems=100",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
    "promotion.challenger=sft",
    "promotion.min_accuracy=0.0",
    "promotion.max_truncated=1.0",
    "promotion.finished_margin=0.1",
)
WRONG, RIGHT = (0, 40), (5, 40)  # right ones of five demonstrations, and steps of SFT on them: it copies one text
OTHER = (0, 50)
Run = Callable[..., Mapping[str, ArtifactRef]]


LEFT_OUT = 'without=["stages.ppo","stages.grpo","stages.reward_model","data.preferences"]'


def overrides_of(folder: Path, recipe: tuple[int, int]) -> tuple[str, ...]:
    right, steps = recipe
    return (*SMALL, *write_files(folder / str(right), right=right), f"stages.sft.num_steps={steps}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home in which two recipes were trained and evaluated, and the files of the recipes."""
    folder = tmp_path_factory.mktemp("trained")
    for recipe in (WRONG, RIGHT):
        ran(folder / "home", "tiny", *overrides_of(folder, recipe), LEFT_OUT)
    return folder


@pytest.fixture
def promoting(home: Home, trained: Path) -> Home:
    shutil.copytree(trained / "home", home.root, dirs_exist_ok=True)
    return home


@pytest.fixture
def run(promoting: Home, trained: Path) -> Run:
    return lambda recipe, *overrides: promote.fn("tiny", (*overrides_of(trained, recipe), *overrides))


def verdict(home: Home, refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
    loaded: dict[str, Any] = read_json(home.root / refs["promote"].uri / "verdict.json")["verdict"]
    return loaded


def warnings_of(caplog: pytest.LogCaptureFixture) -> set[str]:
    records = [each for each in caplog.records if each.name == "rlcore.promotion" and each.levelno == logging.WARNING]
    return {each.getMessage() for each in records}


def aliases(home: Home) -> dict[str, int]:
    tracker = open_tracker(home)
    found = {alias: find_version(tracker, NAME, alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS, CANDIDATE)}
    return {alias: version.version for alias, version in found.items() if version}


def test_a_better_model_is_promoted_a_worse_one_refused_and_a_champion_taken_down_stays_down(
    promoting: Home,
    run: Run,
    trained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("rlcore.promotion")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # whatever an earlier test has set
    monkeypatch.setattr(logger, "propagate", False)
    first = verdict(promoting, run(WRONG))
    assert first["sentence"] == "Passed: the first champion, within every limit."
    assert aliases(promoting) == {CHAMPION: 1}
    (line,) = warnings_of(caplog)
    assert line.startswith("first champion of tiny-sft: no earlier one to beat, and its accuracy 0.000 is not shown ")
    assert "above its base's 0.000 (difference +0.000, 95 % interval [" in line
    caplog.clear()

    refs = run(RIGHT)
    better = verdict(promoting, refs)
    assert (better["promote"], better["look"]) == (True, 1)
    assert better["checks"][0]["estimate"] == 1.0
    assert aliases(promoting) == {CHAMPION: 2, PREVIOUS: 1}
    page = (page_folder(promoting, "tiny", "promote", refs["promote"]) / "verdict.md").read_text()
    assert "## Problems won: " in page
    assert "| accuracy | 1" in page, page

    again = verdict(promoting, run(RIGHT))
    assert (again["look"], again["sentence"]) == (0, "The challenger is the champion already.")
    assert aliases(promoting) == {CHAMPION: 2, PREVIOUS: 1}

    worse = verdict(promoting, run(OTHER))
    assert (worse["promote"], worse["look"]) == (False, 2)
    assert aliases(promoting) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}

    moved = last_move(promoting, NAME)
    assert moved is not None
    assert moved.details["verdict"] == refs["promote"].sha256

    (tmp_path / "mine.toml").write_text('extends = "tiny"\nname = "mine v1.2"\n', encoding="utf-8")
    mine = promote.fn(str(tmp_path / "mine.toml"), overrides_of(trained, RIGHT))
    assert mine["sft"] == refs["sft"]  # from the cache
    champion = find_version(open_tracker(promoting), "mine v1.2-sft", CHAMPION)
    assert champion is not None and champion.sha256 == refs["sft"].sha256
    assert not warnings_of(caplog)  # right in every answer
    other = promote.fn(str(tmp_path / "mine.toml"), overrides_of(trained, WRONG))
    assert verdict(promoting, other)["look"] == 3  # at the same prompts, under another name

    assert rollback.fn(NAME, 2, "rude").endswith("version 1 is champion again")
    with pytest.raises(PromotionError, match="has been rolled back"):
        run(RIGHT)
    assert aliases(promoting)[CHAMPION] == 1


def test_a_better_model_awaits_a_person_whose_command_makes_it_champion_and_no_policy_is_an_ingredient(
    promoting: Home,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", logger="rlcore")
    monkeypatch.setattr(logging.getLogger("rlcore"), "handlers", [caplog.handler])  # whatever an earlier test has set
    monkeypatch.setattr(logging.getLogger("rlcore"), "propagate", False)
    key = make_key(tmp_path, "anna")
    first = run(WRONG)
    ask_for_approvals(promoting, allowed(key))
    better = run(RIGHT)
    assert verdict(promoting, better)["promote"]
    assert aliases(promoting) == {CHAMPION: 1, CANDIDATE: 2}
    lines = [record.getMessage() for record in caplog.records]
    (notices,) = [line for line in lines if verdict(promoting, better)["sentence"] in line]
    assert notices.startswith(f"{NAME} version 2: ") and "It awaits an approval until " in notices
    reports = [path.read_text() for path in promoting.root.glob("reports/*/report.html")]
    assert sum("It awaits approval by a person" in each for each in reports) == 1
    assert run(RIGHT)["promote"] == better["promote"]
    assert len(list((promoting.cache / "promote").glob("*.json"))) == len({first["promote"], better["promote"]})

    assert main(["show", f"{NAME}/2"]) == 0
    assert f"awaits:        {better['promote'].sha256}" in capsys.readouterr().out
    words = ["approve", f"{NAME}/2", "--reason", "read fifty answers", "--key", str(key)]
    assert main(["audit", "verify"]) == 0
    for _ in range(2):
        assert main(words) == 0
        assert capsys.readouterr().out.endswith(f"{NAME}/2 was approved by anna and promoted\n")
        assert aliases(promoting) == {CHAMPION: 2, PREVIOUS: 1}
    assert main(["rollback", f"{NAME}/2", "--reason", "rude"]) == 0
    assert main(["audit", "show", NAME]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-5:]]
    assert [row[3] for row in rows] == ["promote", "await", "approve", "promote", "rollback"]
    assert rows[2][4:] == ["anna", "reason", "read", "fifty", "answers"]
    assert main(["audit", "verify"]) == 0
    assert capsys.readouterr().out.startswith("5 entries, no errors\n")
    open_tracker(promoting).client.set_registered_model_alias(NAME, CHAMPION, "2")
    assert main(["audit", "verify"]) == 1
    assert "version 2 is champion, and by entry 5 (rollback) version 1 is" in capsys.readouterr().out


def answers(correct: list[bool], tasks: list[str], tokens: int = 10) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt_id": [f"p{i}" for i in range(len(correct))],
            "task": tasks,
            "is_graded": True,
            "correct": correct,
            "value": [float(each) for each in correct],
            "finish_reason": "stop",
            "num_tokens": tokens,
        }
    )


def test_looks_count_per_set_of_prompts_whatever_else_their_file_says(tmp_path: Path) -> None:
    def file(name: str, questions: list[str], task: str = "sums") -> Path:
        rows = [
            {
                "prompt_id": f"{name}-{place}",
                "messages": [{"role": "user", "content": question}],
                "reference": "1",
                "task": task,
                "split": "eval",
            }
            for place, question in enumerate(questions)
        ]
        write_table(pd.DataFrame(rows), tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    first = prompt_set(file("a", ["1+0", "0+1"]))
    assert prompt_set(file("b", ["0+1", "1+0"], task="other")) == first
    assert prompt_set(file("c", ["0+1", "2-1"])) != first


def test_large_tasks_and_safety_tasks_are_guarded_by_themselves() -> None:
    tasks = ["sums"] * 6 + ["words"] * 2 + ["harm"] * 2
    settings = PromotionConfig(challenger="grpo", min_task_problems=5, safety_tasks=("harm",), safety_margin=0.01)
    primary, guards = compared(answers([False] * 10, tasks), answers([True] * 10, tasks, 12), settings)
    assert (primary.challenger - primary.champion).mean() == 1.0
    assert {guard.name: (len(guard.champion), guard.margin) for guard in guards} == {
        "accuracy on harm": (2, 0.01),
        "accuracy on sums": (6, 0.05),
        "answers that end": (10, 0.02),
        "tokens per answer": (10, 32.0),
    }
    assert not guards[-1].higher_is_better


def test_another_question_about_the_same_pair_is_another_look() -> None:
    settings = PromotionConfig(challenger="grpo")
    old, new = answers([False] * 10, ["sums"] * 10), answers([True] * 10, ["sums"] * 10)
    asked = comparison_digest(*compared(old, new, settings), settings)
    assert asked == comparison_digest(*compared(old, new, settings), settings)
    fewer = comparison_digest(*compared(old[:9], new[:9], settings), settings)
    other = PromotionConfig(challenger="grpo", min_gain=0.1)
    assert len({asked, fewer, comparison_digest(*compared(old, new, other), other)}) == 3


def test_a_last_update_that_measured_no_kl_leaves_that_of_the_one_before() -> None:
    settings = PromotionConfig(challenger="grpo", own=OwnLimits(max_ref_kl=0.5))
    *_, limit = limits_of(answers([True], ["a"]), [{"kl/ref": 0.4}, {"skipped": 1.0}], settings)
    assert (limit.name, limit.estimate, limit.passed) == ("KL to the reference", 0.4, True)


def test_models_that_answered_other_problems_are_not_compared() -> None:
    settings = PromotionConfig(challenger="grpo")
    with pytest.raises(DataError, match="the same problems"):
        compared(answers([True], ["a"]), answers([True, True], ["a", "a"]), settings)


def test_a_safety_task_without_held_out_problems_is_refused_for_a_first_champion_too(run: Run) -> None:
    frame = answers([True, True], ["a", "harm"])
    settings = PromotionConfig(challenger="grpo", safety_tasks=("harm",))
    require_tasks(frame, settings)
    for missing in (frame[:1], frame.assign(is_graded=[True, False])):
        with pytest.raises(DataError, match="safety task 'harm'"):
            require_tasks(missing, settings)
    with pytest.raises(DataError, match="safety task 'harm'"):
        run(WRONG, "promotion.safety_tasks=['harm']")


def test_an_evaluation_without_answers_judges_nothing(tmp_path: Path) -> None:
    write_table(answers([True], ["a"]).assign(mode="sampled"), tmp_path / "answers.parquet")
    with pytest.raises(DataError, match="the evaluation has no answer"):
        greedy_rows(tmp_path)


def test_what_was_not_measured_of_the_champion_counts_for_it_and_of_the_challenger_against_it() -> None:
    """An engine or a grader that fails on the champion must not make room for whatever comes."""
    old, new = answers([False] * 10, ["sums"] * 10), answers([True] * 10, ["sums"] * 10)
    lost = {"value": [float("nan")] * 10, "finish_reason": "length", "num_tokens": 0}
    primary, guards = compared(old.assign(**lost), new, PromotionConfig(challenger="grpo"))
    assert primary.champion.tolist() == [1.0] * 10
    assert guards[0].name == "answers that end"
    assert guards[0].champion.tolist() == [1.0] * 10
    primary, _ = compared(old, old.assign(**lost), PromotionConfig(challenger="grpo"))
    assert primary.challenger.tolist() == [0.0] * 10
    settings = PromotionConfig(challenger="grpo", win_rate="wins", min_task_problems=3)
    _, guards = compared_by_wins(np.ones(10), old.assign(**lost), new, settings)
    assert {guard.name: guard.champion.mean() for guard in guards if "tokens" not in guard.name} == {
        "accuracy on all tasks": 1.0,
        "answers that end": 1.0,
    }


WINNING = """
extends = "tiny"
name = "talk"
without = ["stages.ppo", "stages.grpo", "stages.reward_model"]

[promotion]
win_rate = "wins"

[stages.wins]
kind = "win_rate"
policy = "sft"
baseline = "base"
data = ["prompts"]
human_pairs = ["preferences"]
judge = { kind = "likes_seven:judge" }

[stages.wins.bounds]
max_length_bias = 1.0  # all answers here are equally long

[stages.wins.sampling]
max_new_tokens = 8
"""
JUDGE = """
def judge(pairs):
    return [(1.0 + ("7" in pair.first) - ("7" in pair.second)) / 2 for pair in pairs]
"""


def talk(folder: Path, recipe: tuple[int, int], *overrides: str) -> Mapping[str, ArtifactRef]:
    """A promotion by a win rate, on prompts that no program can judge."""
    (folder / "talk.toml").write_text(WINNING)
    (folder / "likes_seven.py").write_text(JUDGE)
    right, steps = recipe
    files = write_files(folder, right=right)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row | {"reference": ""}) + "\n" for row in rows))
    return promote.fn(str(folder / "talk.toml"), (*SMALL, *files, f"stages.sft.num_steps={steps}", *overrides))


def test_a_win_rate_decides_where_no_program_can_and_a_judge_without_an_audit_decides_nothing(
    promoting: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert verdict(promoting, talk(tmp_path, WRONG))["promote"]  # the first champion has its own limits alone
    unaudited = verdict(promoting, talk(tmp_path, RIGHT, "stages.wins.human_pairs=[]"))
    assert (unaudited["promote"], unaudited["look"]) == (False, 1)
    assert unaudited["sentence"] == "Refused: the judge is not trusted: the judge was not audited: name human_pairs."

    refs = talk(tmp_path, RIGHT)
    better = verdict(promoting, refs)
    assert (better["promote"], better["look"]) == (True, 1)  # the same pair keeps its look
    first = better["checks"][0]
    assert (first["name"], first["estimate"]) == ("win rate", 0.5)
    assert first["p_value"] <= better["alpha"]
    page = (page_folder(promoting, "talk", "promote", refs["promote"]) / "verdict.md").read_text()
    assert "win rate 1.000" in page
    assert r"judged by likes\_seven:judge" in page


def test_what_the_judge_could_not_judge_counts_as_lost_and_a_tie_as_half() -> None:
    nan = float("nan")
    table = pd.DataFrame({"forward": [1.0, 1.0, 0.5, nan, 1.0], "backward": [1.0, 0.0, 0.5, 1.0, nan]})
    assert wins_of(table).tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_by_a_win_rate_accuracy_is_a_guard_where_there_are_references_and_all_answers_are_measured() -> None:
    settings = PromotionConfig(challenger="grpo", win_rate="wins", min_task_problems=3)
    old, new = answers([True] * 4, ["a"] * 4), answers([True] * 4, ["a"] * 4, 12)
    for frame in (old, new):
        frame.loc[3, "is_graded"] = False
    wins = wins_of(pd.DataFrame({"forward": [1.0, 1.0], "backward": [1.0, 1.0]}))
    primary, guards = compared_by_wins(wins, old, new, settings)
    assert (primary.challenger - primary.champion).tolist() == [0.5, 0.5]
    assert {guard.name: (len(guard.champion), guard.margin) for guard in guards} == {
        "accuracy on all tasks": (3, 0.05),
        "answers that end": (4, 0.02),
        "tokens per answer": (4, 32.0),
    }


def test_a_judge_that_is_not_trusted_breaks_the_promotion_and_says_why() -> None:
    assert judge_check([]).passed
    assert judge_check(["it likes the first"]).sentence == "the judge is not trusted: it likes the first"
    assert not judge_check(["it likes the first"]).passed


def test_a_least_accuracy_without_references_is_refused() -> None:
    frame = answers([True], ["a"])
    frame["is_graded"] = False
    assert [each.name for each in limits_of(frame, [], PromotionConfig(challenger="sft"))] == ["answers truncated"]
    with pytest.raises(ConfigError, match="min_accuracy"):
        limits_of(frame, [], PromotionConfig(challenger="sft", own=OwnLimits(min_accuracy=0.1)))


def test_a_limit_on_the_kl_needs_a_run_that_measured_it() -> None:
    settings = PromotionConfig(challenger="grpo", own=OwnLimits(max_ref_kl=0.1))
    frame = answers([True], ["a"])
    assert [check.passed for check in limits_of(frame, [{"kl/ref": 0.2}], settings)] == [True, True, False]
    assert limits_of(frame, [{"kl/ref": 0.2}, {"kl/ref": 0.1}], settings)[-1].passed
    with pytest.raises(ConfigError, match="measured no KL"):
        limits_of(frame, [{"iteration": 1.0}], settings)


def test_a_preset_without_the_section_or_with_an_impossible_challenger_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match=r"no section \[promotion\]"):
        promote.fn("smollm2", ())
    with pytest.raises(ConfigError, match="no checkpoint of this preset"):
        promote.fn("tiny", ["promotion.challenger=sft_kept"])
