"""The code preset on a micro model, inline: tasks are tried at the gate, rollouts run in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.tasks.steps.rows import read_prompts
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.micro import ONE_LAYER
from tests.flows.warm import run_warm
from tests.rlcore.sandbox.conftest import require_bubblewrap

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
    settings = [part for setting in (*SETTINGS, *write_files(home)) for part in ("--set", setting)]
    done = run_warm(["run", "--preset", "rlvr_code", *settings], environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    return home


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
