"""Messages of runs that go wrong on the first day: each names the cause, in the log, `show` and the report."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.rlcore.sandbox.conftest import require_bubblewrap

pytestmark = pytest.mark.slow

PRESET = """name = "mine"
seed = 0
[hardware]
num_threads = 1
[model]
source = "scratch"
license = "Apache-2.0"
[model.shape]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
intermediate_size = 64
max_positions = 128
[data.prompts]
contract = "prompts"
adapter = "prompts"
path = "prompts.jsonl"
num_train = 24
num_eval = 8
max_tokens = 60
[data.demonstrations]
contract = "demonstrations"
adapter = "demonstrations"
path = "demonstrations.jsonl"
num_train = 16
num_eval = 4
max_tokens = 80
[stages.sft]
kind = "sft"
init_from = "base"
data = ["demonstrations"]
num_steps = 3
batch_size = 4
learning_rate = 1e-30
min_rare_word_match = 0.0
[stages.grpo]
kind = "rl"
init_from = "sft"
prompts = { prompts = 1.0 }
algorithm = "grpo"
num_iterations = 2
prompts_per_iteration = 4
group_size = 4
learning_rate = 1e-4
rewards = [{ kind = "math" }]
sampling.max_new_tokens = 4
update.lora.rank = 2
[evaluation]
num_problems = 4
max_new_tokens = 4
num_samples = 0
"""


def row(number: int, *, question: str = "", **fields: str) -> str:
    """A line of a data file; ``question`` is a sum unless given."""
    messages = [{"role": "user", "content": question or f"What is {number}+{3 * number}?"}]
    return json.dumps({"messages": messages, "reference": str(4 * number), "task": "sums", **fields}) + "\n"


@dataclass(frozen=True, kw_only=True)
class Done:
    """Output of a command, and its exit code."""

    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Project:
    """The user's folder, with its state."""

    folder: Path

    def rlcore(self, *arguments: str) -> Done:
        done = run_warm([*arguments], environment(self.folder / ".rlcore"), self.folder)
        return Done(code=done.returncode, text=done.stdout + done.stderr)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("messages")
    prompts = (row(number, prompt_id=f"q{number}") for number in range(32))
    demonstrations = (
        row(number, demonstration_id=f"d{number}", completion=str(4 * number)) for number in range(100, 120)
    )
    (folder / "prompts.jsonl").write_text("".join(prompts))
    (folder / "demonstrations.jsonl").write_text("".join(demonstrations))
    (folder / "mine.toml").write_text(PRESET)
    return Project(folder=folder)


@pytest.fixture(scope="module")
def run(project: Project) -> Done:
    done = project.rlcore("run", "mine.toml")
    assert done.code == 0, done.text
    return done


def test_answers_that_are_all_cut_are_named_and_not_the_difficulty_of_the_prompts(run: Done) -> None:
    (alarm,) = [line for line in run.text.splitlines() if "health alarm: " in line and "zero_signal" in line]
    assert re.search(
        "health alarm: (every answer was|9.% of the answers were) cut at sampling.max_new_tokens = 4", alarm
    )
    assert "fix: raise sampling.max_new_tokens" in run.text
    assert "harder prompts" not in run.text


def test_a_stage_that_ends_with_the_weights_of_its_start_says_so_before_it_is_done(run: Done) -> None:
    lines = run.text.splitlines()
    for stage, why in (
        ("sft", "its updates are smaller than the precision of the saved weights (learning_rate = 1e-30)"),
        ("grpo", "no iteration took an optimizer step, because no group of answers had a signal"),
    ):
        (alarm,) = [
            n for n, line in enumerate(lines) if f"{stage}: health alarm: the policy did not change: {why}" in line
        ]
        assert lines[alarm + 1].startswith("  fix: ")
        assert f"{stage}: done" in lines[alarm + 2]


def test_show_and_the_report_tell_that_a_model_did_not_change(run: Done, project: Project) -> None:
    shown = project.rlcore("show", "mine.toml").text
    unchanged = {
        line.split()[0] for line in shown.splitlines() if "unchanged: the weights are those of its start" in line
    }
    assert unchanged == {"sft", "grpo"}
    (report,) = [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("report")]
    page = Path(report).read_text(encoding="utf-8")
    for stage in unchanged:
        assert f"{stage} did not change the model: its weights are those of its start." in page
    assert re.search("cut at sampling.max_new_tokens = 4(, and [^;]*)?; raise sampling.max_new_tokens", page)


def test_the_run_ends_with_the_names_of_its_models_and_what_changed(run: Done) -> None:
    text = run.text
    assert re.search(r"^model grpo +mine-grpo/1 ", text, re.MULTILINE)
    assert "rlcore serve mine-grpo/1; rlcore export mine-grpo/1 FOLDER" in text
    assert "\ngrpo is not told apart from sft: +0 points [" in text
    assert "rlcore.tasks" not in text  # names of modules tell a user nothing


DIGITS = """def digits(rollouts):
    return [sum(map(str.isdigit, rollout.text)) / max(1, len(rollout.text)) for rollout in rollouts]
"""


def test_a_learning_rate_that_wrecks_the_policy_is_named_and_not_called_solved(run: Done, project: Project) -> None:
    (project.folder / "my_digits.py").write_text(DIGITS)
    changes = (
        "learning_rate=1.0",
        "update.lora.rank=0",
        "num_iterations=6",
        "sampling.max_new_tokens=8",
        "rewards=[{kind='my_digits:digits'}]",
    )
    overrides = [part for change in changes for part in ("--set", f"stages.grpo.{change}")]
    text = project.rlcore("run", "mine.toml", *overrides).text
    assert "warning: stages.grpo.learning_rate = 1.0: recipes have at most 0.1" in text
    alarms = [line for line in text.splitlines() if "health alarm: " in line and "policy did not change" not in line]
    assert alarms
    assert all("the update was too large (learning_rate = 1): entropy " in line for line in alarms)
    assert "fix: lower learning_rate, and start again" in text and "are solved" not in text


def test_a_reference_that_grades_no_answer_is_named_by_its_row(project: Project) -> None:
    rows = [row(number, prompt_id=f"q{number}") for number in range(24)]
    rows[17] = row(17, prompt_id="q17", reference="proof")
    (project.folder / "odd.jsonl").write_text("".join(rows))
    changes = ("--set", "data.prompts.path=odd.jsonl", "--set", "data.prompts.num_train=16")
    found = project.rlcore("validate", "mine.toml", *changes)
    assert found.code == 1
    assert "line 18, reference: no answer can be graded with it (\"it is not an answer: 'proof'\")" in found.text


def test_evaluation_prompts_that_share_words_with_training_are_told_in_a_sentence(project: Project) -> None:
    for name, start in (("train", "Answer with a number. "), ("eval", "")):
        questions = (start + " ".join(f"word{number}x{place}" for place in range(14)) for number in range(20))
        rows = (row(number, question=each, prompt_id=f"{name}{number}") for number, each in enumerate(questions))
        (project.folder / f"{name}.jsonl").write_text("".join(rows))
    paths = ("path=train.jsonl", "eval_path=eval.jsonl", "num_train=20", "num_eval=20", "max_tokens=500")
    overrides = [part for path in paths for part in ("--set", f"data.prompts.{path}")]
    found = project.rlcore("validate", "mine.toml", *overrides)
    assert "warning: 20 of 20 evaluation prompts share 13 words with training\n" in found.text


def test_a_code_task_says_which_test_its_solution_fails_and_with_what(project: Project) -> None:
    require_bubblewrap()
    tests = [{"input": "3", "output": "6"}, {"input": "4", "output": "8"}]
    solutions = ("print(2 * int(open(0).read()))", "print(6)")
    with (project.folder / "code.jsonl").open("w") as file:
        for number, solution in enumerate(solutions):
            task = {"style": "stdin", "tests": tests, "solution": solution}
            file.write(row(number, prompt_id=f"c{number}", reference=json.dumps(task)))
    found = project.rlcore("validate", "code.jsonl", "--contract", "code_tasks")
    assert "line 2, reference: its solution does not pass its tests" in found.text
    assert "test 2 of 2, input '4': printed '6\\\\n', expected '8'" in found.text
    assert "line 1, reference" not in found.text
