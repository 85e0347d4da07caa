"""Records of a benchmark: their means, their place in keys, and the guards of the promotion gate that they make."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.config.answers import BenchmarkConfig
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.evaluation.intervals import accuracy
from rlcore.evaluation.promotion import PairedMetric, PromotionRule, decide
from rlcore.extras import install_command
from rlcore.tasks.kinds.benchmark.step import metrics_of, run_benchmark, summarize, task_files
from rlcore.tasks.kinds.promote.step import asked_both


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


def test_a_challenger_that_loses_a_task_is_refused_though_it_gains_elsewhere() -> None:
    old = records(*[1.0] * 90, *[0.0] * 10)
    found = verdict(old, records(*[1.0] * 60, *[0.0] * 40), margin=0.05)
    assert not found.promote
    (check,) = [each for each in found.checks if each.name == "sums, acc,none"]
    assert check.estimate == pytest.approx(-0.3) and check.limit == -0.05
    assert "sums, acc,none changes by -0.3; a loss of 0.05 or more is not ruled out" in found.sentence


def test_a_challenger_that_keeps_the_task_is_promoted_whatever_the_order_of_its_records() -> None:
    old = records(*[1.0] * 190, *[0.0] * 10)
    found = verdict(old, old.sample(frac=1.0, random_state=0), margin=0.05)
    assert found.promote
    assert verdict(old, old, margin=0.05).checks == found.checks


def test_too_few_documents_rule_no_loss_out() -> None:
    same = records(1.0, 1.0, 0.0, 1.0)
    found = verdict(same, same, margin=0.05)
    assert not found.promote and "not enough problems" in found.sentence


def test_each_task_is_a_guard_of_its_own() -> None:
    old = pd.concat([records(*[1.0] * 200), records(*[1.0] * 200, task="words")])
    new = pd.concat([records(*[1.0] * 200), records(*[1.0] * 150, *[0.0] * 50, task="words")])
    found = verdict(old, new, margin=0.05)
    assert {each.name: each.passed for each in found.checks[1:]} == {"sums, acc,none": True, "words, acc,none": False}


@pytest.mark.parametrize(
    "other",
    [records(1.0, 1.0, text="b"), records(1.0), records(1.0, 1.0, task="words")],
    ids=["texts", "fewer", "task"],
)
def test_other_documents_are_refused(other: pd.DataFrame) -> None:
    with pytest.raises(DataError, match="different documents"):
        asked_both(records(1.0, 1.0), other, margin=0.05)


def test_a_benchmark_without_records_stands_guard_over_nothing_and_is_refused() -> None:
    with pytest.raises(DataError, match="has no records"):
        asked_both(records(), records(), margin=0.05)


def test_a_share_has_wilsons_interval_and_another_figure_a_bootstrap() -> None:
    table = pd.concat([records(1.0, 0.0, 1.0, 1.0), records(0.5, 0.2, 0.8, task="words")])
    shares, others = summarize(table, seed=0, confidence=0.95)
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
    assert metrics_of([shares]) == {
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
    monkeypatch.delitem(sys.modules, "rlcore.evaluation.lm_eval", raising=False)
    context: Any = SimpleNamespace(config=sections(tmp_path), stage="skills")
    with pytest.raises(ConfigError, match=r"stages\.skills needs the evaluation harness") as fault:
        run_benchmark(context, policy="grpo")
    assert install_command("benchmarks") in str(fault.value)
