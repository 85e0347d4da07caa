"""Every shape of graph as a whole run on a micro model, and code that is run by a reward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.metrics import check_names
from rlcore.tasks.presets.graph import contrasts, rl_stages, same_start_runs
from rlcore.tasks.steps.rows import read_prompts
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ran
from tests.flows.homes import folder, record
from tests.flows.micro import ONE_LAYER
from tests.rlcore.sandbox.conftest import require_bubblewrap

MICRO = (
    "hardware.num_threads=1",
    "model.source=scratch",
    "model.shape.hidden_size=32",
    "model.shape.num_layers=1",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=32",
    "evaluation.num_problems=6",
    "evaluation.num_samples=0",
    "evaluation.num_monitor_problems=4",
    "health.action=warn",
)
HALF = "hardware.dtype=bfloat16"
SIZES = {
    "data": {"num_train": 24, "num_eval": 8},
    "sft": {"num_steps": 2, "batch_size": 4},
    "reward_model": {"num_epochs": 1, "batch_size": 4, "min_accuracy": 0.0},
    "win_rate": {"max_unjudged": 0.1},
    "difficulty": {"num_prompts": 12},
    "benchmark": {"limit": 8},
    "dpo": {"num_epochs": 1, "batch_size": 4},
    "rl": {"num_iterations": 2, "prompts_per_iteration": 4, "group_size": 2, "eval_every": 2},
}


def overrides_of(preset: str) -> list[str]:
    config = open_preset(preset)
    sized = [(f"data.{name}", SIZES["data"]) for name in config.data]
    sized += [(f"stages.{name}", SIZES[stage.kind]) for name, stage in config.stages.items()]
    return [*MICRO, *(f"{path}.{key}={value}" for path, sizes in sized for key, value in sizes.items())]


def small_run(home: Path, preset: str, *overrides: str) -> Path:
    ran(home, preset, *overrides_of(preset), *overrides)
    return home


def comparison(home: Path) -> str:
    (path,) = home.glob("pages/*/compare/*/comparison.md")
    return path.read_text()


@pytest.mark.parametrize("preset", ["r1_zero", "rl_instruct"])
def test_rl_from_the_base_needs_neither_demonstrations_nor_sft(preset: str) -> None:
    config = open_preset(preset)
    by_name = {stage.name: stage for stage in stages(config)}
    assert set(by_name) == {"import_sft", "prepare_prompts", "grpo", "evaluate_base", "evaluate_grpo", "compare"}
    assert by_name["grpo"].inputs == ("import_sft", "prepare_prompts")


@pytest.fixture(scope="module")
def zero_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("r1_zero"), "r1_zero", HALF)


def test_r1_zero_runs_from_the_base_to_the_comparison_in_half_precision(zero_home: Path) -> None:
    assert "bfloat16" in json.dumps(record(zero_home, "grpo")["ingredients"]["machine"])
    assert record(zero_home, "grpo")["ingredients"]["inputs"].keys() == {"import_sft", "prepare_prompts"}
    assert "| grpo - base |" in comparison(zero_home)


def test_a_stage_starts_from_a_registered_model_which_is_evaluated_beside_what_comes_of_it(
    zero_home: Path, tmp_path: Path
) -> None:
    shutil.copytree(zero_home, tmp_path, dirs_exist_ok=True)
    home = small_run(tmp_path, "r1_zero", "stages.grpo.init_from=models:/r1_zero-grpo/1", "name=again", HALF)
    records = [json.loads(path.read_text()) for path in (home / "cache" / "grpo").glob("*.json")]
    (again,) = [each for each in records if "start_grpo" in each["ingredients"]["inputs"]]
    assert again["ingredients"]["inputs"]["start_grpo"] == record(home, "start_grpo")["ref"]["sha256"]
    weights = [(home / path / "model" / "model.safetensors").read_bytes() for path in starts(home, records)]
    assert weights[0] == weights[1]
    (page,) = home.glob("pages/again/compare/*/comparison.md")
    assert "| grpo - start_grpo |" in page.read_text()


def starts(home: Path, records: list[dict[str, Any]]) -> list[str]:
    (first,) = [each for each in records if "start_grpo" not in each["ingredients"]["inputs"]]
    return [str(first["ref"]["uri"]), str(record(home, "start_grpo")["ref"]["uri"])]


@pytest.mark.slow
def test_two_rl_stages_follow_each_other_and_each_is_held_against_its_start(tmp_path: Path) -> None:
    home = small_run(tmp_path, "two_rl")
    inputs = record(home, "dapo")["ingredients"]["inputs"]
    assert inputs["grpo"] == record(home, "grpo")["ref"]["sha256"]
    assert contrasts(open_preset("two_rl")) == (("sft", "base"), ("grpo", "sft"), ("dapo", "grpo"))
    assert "| dapo - grpo |" in comparison(home)
    assert [record(home, name)["ingredients"]["arguments"]["earlier"] for name in ("grpo", "dapo")] == [0, 1]
    asked = [read_table(folder(home, name) / "rollouts" / "iteration-00001.parquet") for name in ("grpo", "dapo")]
    first, second = (table[~table["replaced"]]["prompt_id"].unique().tolist() for table in asked)
    assert first != second  # each draws in an order of its own


@pytest.mark.slow
def test_three_algorithms_from_one_start_are_compared_with_each_other_under_their_own_names(tmp_path: Path) -> None:
    home = small_run(tmp_path, "three_way")
    page = comparison(home)
    for contrast in ("grpo - sft", "ppo - sft", "dapo - sft", "ppo - grpo", "dapo - grpo", "dapo - ppo"):
        assert f"| {contrast} |" in page
    assert same_start_runs(open_preset("three_way")) == (("grpo", "ppo", "dapo"),)
    title = "## grpo against ppo against dapo at equal samples and at equal compute\n\n"
    assert f"{title}Each run is shown at its last evaluation within " in page
    assert [rl.algorithm for rl in rl_stages(open_preset("three_way")).values()] == [
        "grpo",
        "ppo",
        "dapo",
    ]


@pytest.fixture(scope="module")
def mixed_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_bubblewrap()
    return small_run(tmp_path_factory.mktemp("mixed"), "mixed")


def test_prompts_of_two_data_sets_are_drawn_by_shares_with_ids_of_their_own(mixed_home: Path) -> None:
    tables = [read_table(path) for path in sorted((folder(mixed_home, "grpo") / "rollouts").glob("*.parquet"))]
    drawn = [row.prompt_id.partition("/")[0] for table in tables for row in table.itertuples()]
    assert {name: drawn.count(name) for name in set(drawn)} == {"sums": 12, "programs": 4}  # 6 and 2 of 8, twice each


def test_each_reward_is_on_its_data_alone_and_has_not_failed_on_the_other(mixed_home: Path) -> None:
    tables = [read_table(path) for path in sorted((folder(mixed_home, "grpo") / "rollouts").glob("*.parquet"))]
    for row in (row for table in tables for row in table.itertuples()):
        expected = {"math", "format"} if row.prompt_id.startswith("sums/") else {"code"}
        assert set(json.loads(row.parts)) == expected
    history = json.loads((folder(mixed_home, "grpo") / "history.json").read_text())
    assert [row["reward/term_unscored/math"] for row in history] == [0.0, 0.0]
    assert [row["reward/errors"] for row in history] == [0.0, 0.0]


def test_curves_and_evaluations_tell_the_data_sets_apart(mixed_home: Path) -> None:
    history = json.loads((folder(mixed_home, "grpo") / "history.json").read_text())
    assert all({"reward/data/sums", "reward/data/programs"} <= set(row) for row in history)
    assert {"eval/data/sums", "eval/data/programs"} <= set(history[-1])
    summary = json.loads((folder(mixed_home, "evaluate_grpo") / "summary.json").read_text())
    assert summary["eval/problems"] == 12.0
    assert {"eval/data/sums", "eval/data/programs"} <= set(summary)
    check_names(summary)
    (report,) = mixed_home.glob("reports/*/report.html")
    assert "By dataset" in report.read_text()


def test_sft_copies_both_data_sets_of_demonstrations(mixed_home: Path) -> None:
    inputs = record(mixed_home, "sft")["ingredients"]["inputs"]
    assert inputs.keys() == {"import_sft", "prepare_worked_sums", "prepare_written_programs"}


SETTINGS = (
    *ONE_LAYER,
    "stages.sft.num_steps=60",
    "stages.sft.learning_rate=5e-3",
    "stages.sft.optim.warmup_steps=5",
    "stages.grpo.num_iterations=2",
    "stages.grpo.prompts_per_iteration=8",
    "stages.grpo.group_size=4",
    "stages.grpo.eval_every=2",
    "stages.grpo.checkpoints.every_iterations=2",
    "evaluation.num_problems=8",
    "evaluation.num_samples=2",
    "evaluation.num_sampled_problems=4",
    "evaluation.num_monitor_problems=4",
)
PROGRAM = "def f(x):\n return x+{}"


def write_files(folder: Path) -> tuple[str, ...]:
    """Tasks to add one or two, and demonstrations that always add one: half of what copies them passes."""
    rows: dict[str, list[dict[str, object]]] = {"prompts": [], "demonstrations": []}
    for number in range(10, 50):
        more = 1 + number % 2
        tests = [{"args": [x], "output": x + more} for x in (0, 5, number)]
        task = {"style": "call", "entry_point": "f", "tests": tests, "solution": PROGRAM.format(more)}
        common = {
            "messages": [{"role": "user", "content": f"{number}"}],
            "reference": json.dumps(task),
            "task": "adding",
            "split": "eval" if number < 20 else "train",
        }
        rows["prompts"].append({"prompt_id": f"p{number}", **common})
        rows["demonstrations"].append({"demonstration_id": f"d{number}", "completion": PROGRAM.format(1), **common})
    overrides = []
    for name, adapter in (("prompts", "code_tasks"), ("demonstrations", "demonstrations")):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]), encoding="utf-8")
        overrides += [
            f"data.{name}.adapter={adapter}",
            f"data.{name}.path={path}",
            f"data.{name}.num_train=30",
            f"data.{name}.num_eval=10",
        ]
    return (*overrides, "data.demonstrations.options={}")


@pytest.fixture(scope="module")
def code_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_bubblewrap()
    home = tmp_path_factory.mktemp("code")
    ran(home, "rlvr_code", *SETTINGS, *write_files(home))
    return home


@pytest.mark.slow  # the preset `mixed` above runs programs; tests/rlcore/rewards has what they earn
def test_the_reward_of_every_rollout_is_what_its_program_gives_on_the_hidden_tests(code_home: Path) -> None:
    tests = {
        row.prompt_id: json.loads(row.reference)["tests"]
        for row in read_prompts(folder(code_home, "prepare_prompts") / "train.parquet")
    }
    tables = [read_table(path) for path in sorted((folder(code_home, "grpo") / "rollouts").glob("*.parquet"))]
    rows = [row for table in tables for row in table.itertuples()]
    rewards = [row.value for row in rows]
    assert rewards == [float(passes(row.text, tests[row.prompt_id])) for row in rows]
    assert {0.0, 1.0} == set(rewards)  # of a copied program; those that the model mars score 0


@pytest.mark.slow
def test_evaluation_counts_the_programs_that_pass(code_home: Path) -> None:
    summary = json.loads((folder(code_home, "evaluate_sft") / "summary.json").read_text())
    answers = read_table(folder(code_home, "evaluate_sft") / "answers.parquet")
    tests = {
        row.prompt_id: json.loads(row.reference)["tests"]
        for row in read_prompts(folder(code_home, "prepare_prompts") / "eval.parquet")
    }
    greedy = answers[answers["mode"] == "greedy"]
    right = [passes(row.completion, tests[row.prompt_id]) for row in greedy.itertuples()]
    assert summary["eval/accuracy"] == pytest.approx(sum(right) / len(right))


def passes(text: str, tests: list[dict[str, object]]) -> bool:
    """The slow and obvious way; the programs are lines of a micro model, and end."""
    space: dict[str, object] = {}
    try:
        exec(text, space)
        return all(space["f"](*test["args"]) == test["output"] for test in tests)  # type: ignore[operator,misc]
    except Exception:  # noqa: BLE001 - whatever a program of the policy raises, it has not passed
        return False
