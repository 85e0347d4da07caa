"""The benchmark against TRL on the smallest shape: both sides do the same work, and unequal work gives no figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import arena
from benchmarks.peers.compare import LAST_WITH_PPO, measure, run_plan
from benchmarks.peers.same import UnequalWorkError, require_same_work
from tests.benchmarks.arms import PLANTS, runner, small_comparison, small_work

pytestmark = pytest.mark.peers
SIDES = {"ours": "ours", "trl": "trl"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", ["grpo", "update", "sft", "rm", "dpo"])
def test_both_sides_do_the_same_work(task: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arena, "run_arm", runner(SIDES, {}))
    comparison = small_comparison(small_work(task, dtype=dtype))
    (measured,) = run_plan("all", [comparison], out=tmp_path / "results.json")["measured"]
    ours, theirs = (each["work"] for each in measured["rounds"])
    assert ours["token ids"] == theirs["token ids"]
    assert ours["products of updates"] == theirs["products of updates"] == [dtype]


@pytest.mark.parametrize("what", PLANTS)
def test_unequal_work_ends_without_a_figure(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arena, "run_arm", runner(SIDES, PLANTS[what]))
    with pytest.raises(UnequalWorkError, match=rf"different work, so no figure(.|\n)*{what}: "):
        run_plan("all", [small_comparison(small_work("grpo"))], out=tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("task", "dtype"), [("ppo", "bfloat16"), ("ppo_shared", "float32")])
def test_ppo_does_the_work_of_the_last_trl_that_has_it(task: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LAST_WITH_PPO))
    work, settings = small_work(task, dtype=dtype), {"microbatch": 4, "option": ""}
    ours, theirs = (measure(work, {**settings, "side": side}, 1)["work"] for side in SIDES)
    require_same_work(ours, theirs, names=("ours", "trl"))
    assert ours["updates"] == len(theirs["gradients"]) == 2
