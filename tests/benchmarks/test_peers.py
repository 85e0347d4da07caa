"""The comparison with TRL: equal work or no figure, forced tokens, the search, and its tables."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import compare
from benchmarks.peers.__main__ import run_side
from benchmarks.peers.compare import PLANS, Comparison, render, run_arm, run_plan
from benchmarks.peers.record import UnequalWorkError, differences
from benchmarks.peers.work import EOS, Work, text_of

PLANTS: dict[str, Mapping[str, Any]] = {
    "token ids": {"prompt_tokens": (7, 12)},
    "updates": {"steps": 1},
    "products of updates": {"dtype": "bfloat16"},
    "trained tokens": {"completion_tokens": (4, 15)},
}


def small_work(task: str, **settings: Any) -> Work:
    group = {"sft": 1, "rm": 2, "dpo": 2}.get(task, 4)
    sizes = {"num_prompts": 8 if group < 4 else 2, "prompt_tokens": (6, 12), "completion_tokens": (4, 16), "steps": 2}
    return Work(task=task, shape="micro", group_size=group, **(sizes | settings))


def small_comparison(work: Work) -> Comparison:
    trial = replace(work, steps=1)
    return Comparison(title=work.task, work=work, trial=trial, rounds=1, tokens=(64, 512), rows=(4, 8))


def runner(sides: Mapping[str, str], planted: Mapping[str, Any]) -> Callable[..., Mapping[str, Any]]:
    """A stand-in for ``compare.run_arm``; ``planted`` are fields of the work that only the side ``trl`` gets."""

    def run(arguments: Sequence[str], *, threads: int, timeout: float | None = None) -> Mapping[str, Any]:
        _, _, side, work, setting = arguments
        given = json.loads(work) | (planted if side == "trl" else {})
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                run_side(sides[side], json.dumps(given), setting)
        except Exception as error:  # noqa: BLE001 - as a process that fails
            return {"failed": f"{type(error).__name__}: {error}"}
        found: Mapping[str, Any] = json.loads(output.getvalue().splitlines()[-1])
        return found

    return run


WORK = small_work("grpo")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fields of the work that only the side ``trl`` gets; both sides are rlcore, in this process."""
    fields: dict[str, Any] = {}
    monkeypatch.setattr(compare, "run_arm", runner({"ours": "ours", "trl": "ours"}, fields))
    monkeypatch.setattr(compare, "version", lambda _: "1.16.0")
    return fields


@pytest.mark.parametrize(
    "task", ["grpo", *(pytest.param(task, marks=pytest.mark.slow) for task in ("update", "sft", "rm", "dpo"))]
)
def test_equal_work_gives_figures(task: str, planted: Mapping[str, Any], tmp_path: Path) -> None:
    results = run_plan("supervised", [small_comparison(small_work(task))], out=tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results))
    (measured,) = results["measured"]
    assert [each["side"] for each in measured["rounds"]] == ["ours", "trl"]
    assert all(each["work"]["updates"] == 2 and each["cpu_seconds"] > 0 for each in measured["rounds"])
    assert [each["option"] for each in measured["search"]] == [*[""] * 4, *compare.OPTIONS.get(task, ())]
    assert f"| {task} | TRL, " in render(results)
    assert ("sync and canaries " in render(results)) is (task == "grpo")


@pytest.mark.parametrize(
    "what", ["updates", *(pytest.param(each, marks=pytest.mark.slow) for each in PLANTS if each != "updates")]
)
def test_unequal_work_ends_without_a_figure(what: str, planted: dict[str, Any], tmp_path: Path) -> None:
    planted |= PLANTS[what]
    unequal = replace(small_comparison(WORK), trial=WORK)
    with pytest.raises(UnequalWorkError, match=rf"different work, so no figure(.|\n)*{what}: "):
        run_plan("supervised", [unequal], out=tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


def record(**changed: Any) -> dict[str, Any]:
    exact = dict.fromkeys(("sequences", "tokens", "trained tokens", "updates"), 1)
    lists = {"weights": ["float32"], "products of updates": ["float32"], "products of other passes": ["float32"]}
    return exact | lists | {"token ids": "a", "advantages": [0.5, -0.5], "gradients": [[3.0, 4.0]]} | changed


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"token ids": "b"}, ["token ids"]),
        ({"weights": ["bfloat16"]}, ["weights"]),
        ({"advantages": [0.5, -0.49]}, ["advantages"]),
        ({"gradients": [[3.0, 4.1]]}, ["gradients"]),
        ({"gradients": [[3.0, 4.001]]}, []),
        ({"gradients": [[5.0]]}, ["gradients"]),
        ({"products of other passes": ["bfloat16"]}, ["products of other passes"]),
        ({"products of other passes": []}, []),
    ],
)
def test_every_kind_of_difference_is_found(changed: Mapping[str, Any], expected: list[str]) -> None:
    assert [name for name, _, _ in differences(record(), record(**changed))] == expected


def test_a_text_has_exactly_its_token_ids() -> None:
    tokenizer = replace(WORK, shape="tiny").make_tokenizer()
    ids = [133, 1023, 11, 10, 2, EOS]
    assert tokenizer(text_of(ids))["input_ids"] == ids


def test_groups_have_the_lengths_and_both_rewards() -> None:
    work = replace(WORK, group_size=8)
    assert [len(prompt) for prompt, _ in work.groups] == work.prompt_lengths.tolist() == [6, 12]
    lengths = torch.tensor([[len(ids) for ids in group] for _, group in work.groups])
    assert lengths.tolist() == work.completion_lengths.tolist()
    assert {ids[-1] for _, group in work.groups for ids in group} == {EOS}
    assert all(EOS not in (*prompt, *(token for ids in group for token in ids[:-1])) for prompt, group in work.groups)
    assert all([ids[0] % 2 for ids in group] == [0, 1] * 4 for _, group in work.groups)


def test_a_process_that_fails_or_hangs_gives_its_reason() -> None:
    assert run_arm(("benchmarks.none",))["failed"].endswith("No module named benchmarks.none")
    assert run_arm(("timeit", "while True: pass"), timeout=0.1) == {"failed": "no result in 0 s"}


def results(plan: str) -> dict[str, Any]:
    """Results of a plan in which TRL takes three times as long, and an audit is a tenth of rlcore's time."""
    run = {"microbatch": 8, "option": "", "wall_seconds": 1.0, "peak_mib": 100.0}
    rounds = [
        run | {"side": side, "cpu_seconds": seconds} | ({"audit_cpu_seconds": 1.0} if side == "ours" else {})
        for side, times in (("ours", (9.0, 10.0, 12.0)), ("trl", (33.0, 30.0, 27.0)))
        for seconds in times
    ]
    failed = run | {"side": "trl", "option": "liger", "failed": "ImportError: no. And why"}
    measured = [{"title": each.title, "search": [rounds[0], failed], "rounds": rounds} for each in PLANS[plan]]
    return {"plan": plan, "commit": "abc", "machine": "here.", "trl": "1.16.0", "measured": measured}


def test_costs_are_medians() -> None:
    lines = render(results("headline")).splitlines()
    ours = "| GRPO, smollm2, float32 | rlcore, 8 tokens | 3 | 1.0 | 10.0 (9.0 to 12.0) | audit 1.0 | 3.00× | 100 |"
    theirs = "| GRPO, smollm2, float32 | TRL, 8 rows | 3 | 1.0 | 30.0 (27.0 to 33.0) | – | 1.00× | 100 |"
    tried = "rlcore, tokens: 8 9.0 (100); TRL, rows: ; liger without a figure (ImportError: no)"
    assert {ours, theirs, f"- GRPO, smollm2, float32: {tried}"} <= set(lines)
