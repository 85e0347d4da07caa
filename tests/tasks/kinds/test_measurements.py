"""Stages that measure a checkpoint: benchmark, difficulty, win_rate and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from rlcore.config.answers import BenchmarkConfig
from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.results import DIFFICULTIES
from rlcore.data_contracts.errors import ContractError
from rlcore.errors import ConfigError, DataError, RewardError, StorageError
from rlcore.evaluation.intervals import accuracy
from rlcore.evaluation.paired_tests import paired_difference
from rlcore.evaluation.promotion import PairedMetric, PromotionRule, decide
from rlcore.extras import install_command
from rlcore.flows.presets import open_preset
from rlcore.rewards.pair_judge import Judgement, Pair
from rlcore.sampling.rejection import Candidate
from rlcore.tasks.kinds.benchmark import kind
from rlcore.tasks.kinds.benchmark import step as benchmark
from rlcore.tasks.kinds.benchmark.step import run_benchmark, task_files
from rlcore.tasks.kinds.compare.page import (
    accuracy_table,
    difference_table,
)
from rlcore.tasks.kinds.difficulty import step as difficulty
from rlcore.tasks.kinds.difficulty.step import difficulties
from rlcore.tasks.kinds.rl.curriculum import curriculum_prompts
from rlcore.tasks.kinds.rl.kind import DrawConfig
from rlcore.tasks.kinds.win_rate.kind import WinRateStage, rewards_behind, shared_pairs, win_rate_stage
from rlcore.tasks.kinds.win_rate.step import PAIRS_PER_CHUNK, JudgedPairs, judge_pairs, reasons_of
from rlcore.tasks.preflight.preset_checks import unusual_values
from rlcore.tasks.preflight.reference_checks import promotion_reference_errors
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.promotion.step import asked_both
from rlcore.tasks.steps.base import StageContext
from rlcore.tasks.store.storage import write_table
from rlcore.types import Message, Prompt


def records(*values: float, task: str = "sums", text: str = "a") -> pd.DataFrame:
    return pd.DataFrame(
        {
            "task": task,
            "doc_id": range(len(values)),
            "doc_sha256": [f"{ord(text) + number:064x}" for number in range(len(values))],
            "metric": "acc,none",
            "value": list(values),
        }
    )


def verdict(champion: pd.DataFrame, challenger: pd.DataFrame, *, margin: float) -> Any:
    guards = asked_both(champion, challenger, margin=margin)
    gain = pd.Series([0.0] * 50 + [1.0] * 50).to_numpy()
    primary = PairedMetric(name="accuracy", champion=gain * 0.0, challenger=gain)
    return decide(primary, guards, (), rule=PromotionRule(), look=1, seed=0)


def test_each_task_is_a_guard_of_its_own_whatever_the_order_of_the_records() -> None:
    old = pd.concat([records(*[1.0] * 200), records(*[1.0] * 200, task="words")])
    new = pd.concat([records(*[1.0] * 200), records(*[1.0] * 140, *[0.0] * 60, task="words")])
    found = verdict(old, new, margin=0.05)
    assert not found.promote
    assert {each.name: each.passed for each in found.checks[1:]} == {"sums, acc,none": True, "words, acc,none": False}
    assert (found.checks[2].estimate, found.checks[2].limit) == (pytest.approx(-0.3), -0.05)
    assert "words, acc,none changes by -0.3; a loss of 0.05 or more is not ruled out" in found.sentence
    assert verdict(old, new.sample(frac=1.0, random_state=0), margin=0.05).checks == found.checks
    assert verdict(old, old, margin=0.05).promote


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (records(1.0, 1.0), records(1.0, 1.0, text="b"), "different documents"),
        (records(1.0, 1.0), records(1.0), "different documents"),
        (records(1.0, 1.0), records(1.0, 1.0, task="words"), "different documents"),
        (records(), records(), "has no records"),
    ],
    ids=["texts", "fewer", "task", "none"],
)
def test_other_documents_and_none_are_refused(old: pd.DataFrame, new: pd.DataFrame, words: str) -> None:
    with pytest.raises(DataError, match=words):
        asked_both(old, new, margin=0.05)


def test_a_share_has_wilsons_interval_and_another_figure_a_bootstrap() -> None:
    table = pd.concat([records(1.0, 0.0, 1.0, 1.0), records(0.5, 0.2, 0.8, task="words")])
    shares, others = benchmark.summarize(table, seed=0, confidence=0.95)
    expected = accuracy([True, False, True, True], confidence=0.95)
    assert shares == {
        "task": "sums",
        "metric": "acc,none",
        "is_share": True,
        "mean": 0.75,
        "low": expected.low,
        "high": expected.high,
        "n": 4,
    }
    assert not others["is_share"]
    assert others["mean"] == pytest.approx(0.5)
    assert others["low"] < 0.5 < others["high"]
    assert benchmark.metrics_of([shares]) == {
        "benchmark/sums/acc": 0.75,
        "benchmark/sums/acc_low": expected.low,
        "benchmark/sums/acc_high": expected.high,
    }


def sections(folder: Path) -> Any:
    settings = BenchmarkConfig(folder=str(folder), tasks=("sums",))
    return SimpleNamespace(stage=SimpleNamespace(settings=settings))


def test_a_key_follows_the_files_of_the_tasks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files of tasks"):
        task_files(sections(tmp_path))
    (tmp_path / "sums.yaml").write_text("a: 1\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    first = task_files(sections(tmp_path))
    assert task_files(sections(tmp_path)) == first
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    second = task_files(sections(tmp_path))
    (tmp_path / "rows.jsonl").rename(tmp_path / "other.jsonl")
    assert len({first, second, task_files(sections(tmp_path))}) == 3


def test_a_checkpoint_that_is_not_the_sealed_one_is_not_asked(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    context: Any = SimpleNamespace(config=sections(tmp_path), stage="skills", inputs={"grpo": tmp_path})
    with pytest.raises(StorageError, match="digests of the model are unreadable"):
        run_benchmark(context, policy="grpo")


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "rlcore.sampling.lm_eval", raising=False)
    context: Any = SimpleNamespace(config=sections(tmp_path), stage="skills")
    with pytest.raises(ConfigError, match=r"stages\.skills needs the evaluation harness") as given:
        run_benchmark(context, policy="grpo")
    assert install_command("benchmarks") in str(given.value)


def test_a_missing_harness_and_a_missing_task_are_named_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_preset("skills", ('stages.skills.tasks=["sum_choice", "gone"]',))
    monkeypatch.setattr(kind, "find_spec", lambda name: None)
    installed, task = kind.errors("stages.skills", config.stages["skills"])
    assert installed == f"stages.skills: the evaluation harness is not installed: {install_command('benchmarks')}"
    assert task.startswith("stages.skills.tasks: there is no file ")
    assert Path(task.rpartition(" ")[2]).name == "gone.yaml"


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
    require(table, DIFFICULTIES)
    assert table[["dataset", "prompt_id", "answers", "passed", "reward"]].values.tolist() == [
        ["a", "p", 2, 1, 0.75],
        ["b", "q", 2, 2, 1.0],
    ]
    found = difficulty.summarize(table, asked=3, seed=0, confidence=0.95)
    assert (found["unscored"], found["never"], found["always"]) == (1, 0, 1)
    assert found["histogram"] == [[0.5, 1], [1.0, 1]]
    assert difficulty.metrics_of(found)["difficulty/always_solved"] == 0.5


def test_a_table_that_does_not_add_up_breaks_its_contract() -> None:
    table = difficulties(answers("p", 1.0, 0.0), prompts_of("a/p"), threshold=0.99, confidence=0.95)
    with pytest.raises(ContractError, match="pass_rate is not passed / answers"):
        require(table.assign(pass_rate=0.25), DIFFICULTIES)
    with pytest.raises(ContractError, match="1 rows are there twice"):
        require(table.loc[[0, 0]].reset_index(drop=True), DIFFICULTIES)


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


GIVEN = (
    "name=own",
    "model={source='folder',path='m',license='-'}",
    "data.pairs.adapter=hh",
    "data.pairs.path=pairs.jsonl",
    "data.prompts.adapter=hh",
    "data.prompts.path=pairs.jsonl",
)
COPY = "data.others={contract='preference_pairs',adapter='hh',path='%s',num_train=9,num_eval=9,max_tokens=9}"
TWIN = "the judge judge_model is a twin of the reward model reward_model: they share training pairs"
LATER = "stages.next={kind='sft',init_from='grpo',data=['shown'],num_steps=1,batch_size=1,learning_rate=1e-3}"
SHOWN = "data.shown={contract='demonstrations',adapter='hh',path='d.jsonl',num_train=9,num_eval=9,max_tokens=9}"


def preset(*overrides: str) -> RunConfig:
    return open_preset("preferences", (*GIVEN, *overrides))


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        ((), []),
        (("stages.judge_model.half=all",), [TWIN]),
        (("stages.judge_model.half=first",), [TWIN]),
        (("stages.reward_model.half=all", "stages.judge_model.half=all"), [TWIN]),
        ((COPY % "pairs.jsonl", "stages.judge_model.data=['others']", "stages.judge_model.half=all"), [TWIN]),
        ((COPY % "own.jsonl", "stages.judge_model.data=['others']", "stages.judge_model.half=all"), []),
        (
            ("stages.win_rate.judge.stage=reward_model",),
            ["the judge reward_model is the reward model that trained grpo"],
        ),
        ((SHOWN, LATER, "stages.win_rate.policy=next", "stages.judge_model.half=all"), [TWIN]),
        (("stages.win_rate.judge={kind='own:judge'}",), []),
    ],
)
def test_a_judge_that_shares_training_pairs_is_planned_as_such(overrides: tuple[str, ...], reasons: list[str]) -> None:
    config = preset(*overrides)
    own = config.stage("win_rate", WinRateStage)
    assert list(shared_pairs(config, own)) == reasons
    assert win_rate_stage("win_rate", config).run.keywords["shared"] == tuple(reasons)  # type: ignore[attr-defined]
    warned = [line for line in unusual_values(config, tuple(config.stages)) if "stages.win_rate.judge" in line]
    assert [reason in line for reason, line in zip(reasons, warned, strict=True)] == [True] * len(reasons)
    refused = list(promotion_reference_errors(config))
    assert len(refused) == len(reasons)
    assert all(line.startswith("promotion.win_rate = 'win_rate': the judge ") for line in refused)


def test_the_reward_models_of_the_policy_are_inputs_of_its_win_rate() -> None:
    config = preset()
    assert rewards_behind(config, config.stage("win_rate", WinRateStage)) == ("reward_model",)
    assert {"judge_model", "reward_model"} <= {*win_rate_stage("win_rate", config).inputs}
    verified = open_preset("win_rate")  # its policy was trained by a verifier
    assert rewards_behind(verified, verified.stage("win_rate", WinRateStage)) == ()


class Longer:
    """The longer answer wins; it fails from its ``fails_from``-th pair on, and counts what it is asked."""

    def __init__(self, fails_from: int = 10**9) -> None:
        self.asked, self.fails_from = 0, fails_from

    def __call__(self, pairs: Sequence[Pair]) -> list[Judgement]:
        found = []
        for pair in pairs:
            failed = self.asked >= self.fails_from
            value = None if failed else float(len(pair.first) > len(pair.second))
            found.append(Judgement(value=value, error="too slow" if failed else "", prompt_tokens=7, cost=0.5))
            self.asked += 1
        return found


def judged_pairs_context(folder: Path, max_unjudged: float = 0.1) -> StageContext:
    settings = SimpleNamespace(max_unjudged=max_unjudged)
    config = SimpleNamespace(stage=SimpleNamespace(settings=settings))
    made: Any = SimpleNamespace(work=folder, stage="win_rate", config=config, report_progress=lambda *_: None)
    return cast(StageContext, made)


def pairs(count: int) -> list[JudgedPairs]:
    asked = (Message(role="user", content="?"),)
    return [(f"p{number}", Pair(messages=asked, first="long", second="s"), "") for number in range(count)]


def test_each_pair_is_asked_in_both_orders_and_a_stage_that_goes_on_asks_for_the_rest_alone(tmp_path: Path) -> None:
    first, second = Longer(), Longer()
    count = PAIRS_PER_CHUNK + 10
    whole = judge_pairs(judged_pairs_context(tmp_path), first, pairs(count), name="verdicts")
    assert first.asked == 2 * count == whole["calls"].sum()
    assert (set(whole["forward"]), set(whole["backward"])) == ({1.0}, {1.0})
    assert (whole["tokens"].sum(), whole["cost"].sum()) == (14 * count, count)
    (tmp_path / "verdicts" / "chunk-00001.parquet").unlink()
    again = judge_pairs(judged_pairs_context(tmp_path), second, pairs(count), name="verdicts")
    assert second.asked == 20
    assert again.equals(whole)


def test_what_has_no_answer_is_unjudged_with_its_reason_and_costs_nothing(tmp_path: Path) -> None:
    asked: list[JudgedPairs] = [*pairs(9), ("lost", None, "no answer: the engine failed")]
    table = judge_pairs(judged_pairs_context(tmp_path), Longer(), asked, name="verdicts")
    row = table.iloc[-1]
    assert (row["error"], row["calls"], bool(row["asked"])) == ("no answer: the engine failed", 0, False)
    assert table["forward"].isna().tolist() == [False] * 9 + [True]


def test_too_many_unjudged_end_the_stage_which_asks_again_when_it_goes_on(tmp_path: Path) -> None:
    count = 2 * PAIRS_PER_CHUNK
    with pytest.raises(RewardError, match=r"judge failed on 14 of 128 pairs \(limit 12.8\), 14 times with: too slow"):
        judge_pairs(
            judged_pairs_context(tmp_path), Longer(fails_from=4 * PAIRS_PER_CHUNK - 28), pairs(count), name="verdicts"
        )
    repaired = Longer()
    assert len(judge_pairs(judged_pairs_context(tmp_path), repaired, pairs(count), name="verdicts")) == count
    assert repaired.asked == 2 * PAIRS_PER_CHUNK  # the chunk that was refused


def test_what_a_judge_wrote_is_no_part_of_why_a_pair_is_unjudged() -> None:
    table = pd.DataFrame({"error": ["no verdict: 'I like'", 'no verdict: "it\'s\nfine"', "too slow", ""]})
    assert reasons_of(table) == {"no verdict": 2, "too slow": 1}


SUMMARY = {
    "eval/accuracy": 0.25,
    "eval/accuracy_low": 0.2,
    "eval/accuracy_high": 0.3,
    "eval/problems": 600.0,
    "completion/length": 12.0,
    "eval/pass_at_1": 0.4,
    "eval/pass_at_1_low": 0.3,
    "eval/pass_at_8": 0.9,
}


def test_an_accuracy_stands_with_its_interval_and_its_pass_at_k() -> None:
    row = accuracy_table({"SFT": SUMMARY}, confidence=0.9).splitlines()[-1]
    assert row == "| SFT | 0.250 | [0.200, 0.300] | 600 | 0.400 | 0.900 (k=8) | 12.0 |"


def test_a_difference_stands_with_its_interval_and_p_value() -> None:
    # 10 problems, 8 right against 2 right, 6 of them only by the new one: McNemar p = 2 * 0.5^6 = 0.031.
    paired = paired_difference([1] * 8 + [0] * 2, [1] * 2 + [0] * 8)
    table = difference_table({"GRPO - SFT": paired}, confidence=0.9)
    assert table.startswith("| contrast | difference | 90 % interval |")
    assert table.splitlines()[-1].startswith("| GRPO - SFT | +0.600 | [")
    assert table.endswith("| 0.031 |")
