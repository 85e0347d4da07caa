"""Evaluations by a custom function, a judge and a reward model; promotion and retraining of the presets to extend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=256)
MODEL = """[model]
source = "folder"
path = "model"
license = "MIT"
[stages.grpo]
num_iterations = 2
prompts_per_iteration = 4
sampling.max_new_tokens = 8
eval_every = 2
[evaluation]
num_problems = 12
num_monitor_problems = 4
max_new_tokens = 8
"""
DATA = """[data.{name}]
contract = "{contract}"
adapter = "{adapter}"
path = "{name}.jsonl"
num_train = 40
num_eval = 20
max_tokens = 160
"""
REWARD_MODEL = """[stages.taste]
kind = "reward_model"
init_from = "base"
data = ["pairs"]
num_epochs = 1
batch_size = 16
learning_rate = 1e-3
head_learning_rate = 1e-3
min_accuracy = 0.0
"""
VERIFIERS = """
verifiers = [
  {{ kind = "my_rewards:brief", options = {{ limit = 10 }}, data = ["prompts"] }},
  {{ kind = "judge", options = {{ base_url = "{url}", model = "judge" }}, correct_from = 0.7, data = ["talk"] }},
  {{ kind = "reward_model", stage = "taste", data = ["more"] }},
]
"""
OWN = '''def brief(rollouts, *, limit=200):
    """Return one float per rollout, or None if it cannot be scored."""
    return [1.0 if len(rollout.text) < limit else 0.0 for rollout in rollouts]
'''


class Judge(BaseHTTPRequestHandler):
    """OpenAI's protocol; rates 8 of 10 what has an even number of characters between the fences, else 3."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        nonce = re.findall(r"<rating (\w+)>", text)[-1]
        answer = re.findall(rf"\[answer {nonce}\]\n(.*)\n\[end of answer {nonce}\]", text, re.DOTALL)[0]
        message = {"role": "assistant", "content": f"<rating {nonce}>{3 if len(answer) % 2 else 8}</rating>"}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """Address of the judge."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def question(number: int) -> dict[str, object]:
    return {"prompt_id": f"p{number}", "messages": [{"role": "user", "content": f"{number} + {number}"}], "task": "t"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, judge: str) -> Path:
    """A user's folder: a model, prompts without references, pairs, a module of rewards, and two presets."""
    folder = tmp_path_factory.mktemp("project")
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "model", seed=0)
    for name, first in (("prompts", 0), ("talk", 200), ("more", 400)):
        write_rows(folder / f"{name}.jsonl", [question(n) | {"reference": ""} for n in range(first, first + 60)])
    pairs = [
        {
            "pair_id": f"p{n}",
            "messages": question(n)["messages"],
            "chosen": f"{n} is right" if n % 3 else f"{n}",
            "rejected": f"?{n}" * (n % 4 + 1),
            "source": "me",
        }
        for n in range(600, 660)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "my_rewards.py").write_text(OWN)
    prompts = "".join(
        DATA.format(name=name, contract="prompts", adapter="prompts") for name in ("prompts", "talk", "more")
    )
    both = DATA.format(name="pairs", contract="preference_pairs", adapter="preferences")
    (folder / "own.toml").write_text(
        'extends = "chat"\nname = "own"\n'
        + MODEL
        + VERIFIERS.format(url=judge)
        + prompts
        + both
        + REWARD_MODEL
        + '[[stages.grpo.rewards]]\nkind = "my_rewards:brief"\noptions = { limit = 10 }\n'
    )
    small = "[stages.win_rate.sampling]\nmax_new_tokens = 8\n[stages.reward_model]\nmin_accuracy = 0.0\n"
    (folder / "mine.toml").write_text(
        'extends = "preferences"\nname = "mine"\n'
        + MODEL
        + DATA.format(name="prompts", contract="prompts", adapter="prompts")
        + both
        + small
        + "[stages.judge_model]\nmin_accuracy = 0.0\n"
    )
    return folder


def rlcore(folder: Path, *arguments: str) -> str:
    """Return the output of a command of the user in that folder, which must succeed."""
    ours = ("PREFECT_", "MLFLOW_", "RLCORE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": str(ROOT), "RLCORE_ENGINE": "inline", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlcore.flows", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def answers_of(folder: Path, checkpoint: str) -> pd.DataFrame:
    """The newest greedy answers of a checkpoint, with the data set of each."""
    cache = folder / ".rlcore" / "cache" / f"evaluate_{checkpoint}"
    record = max(cache.glob("*.json"), key=lambda path: path.stat().st_mtime)
    uri = json.loads(record.read_text())["ref"]["uri"]
    table = pd.read_parquet(folder / ".rlcore" / uri / "answers.parquet")
    return table.assign(dataset=table["prompt_id"].str.partition("/")[0])


def test_an_own_function_a_judge_and_a_reward_model_decide_on_held_out_answers_and_on_the_promotion(
    project: Path,
) -> None:
    said = rlcore(project, "promote", "own.toml")
    assert "own-grpo version 1: Passed: the first champion" in said
    table = answers_of(project, "grpo")
    assert table["is_graded"].all() and set(table["dataset"]) == {"prompts", "talk", "more"}
    own, talk, more = (table[table["dataset"] == name] for name in ("prompts", "talk", "more"))
    assert own["correct"].tolist() == [len(text) < 10 for text in own["completion"]]
    assert set(talk["value"]) <= {0.3, 0.8} and talk["correct"].tolist() == (talk["value"] > 0.7).tolist()
    assert more["correct"].tolist() == (more["value"] >= 0.0).tolist() and more["value"].nunique() > 1
    assert re.search(r"grpo: iteration 2/2 .* eval_accuracy=0\.\d+", said)
    assert "nothing to do: version 1 of own-grpo" in rlcore(project, "retrain", "own.toml")
    again = rlcore(project, "promote", "own.toml", "--set", "stages.grpo.learning_rate=2e-5")
    assert "# own-grpo: against version 1" in again
    assert "**Refused: accuracy changes by " in again


def test_a_change_of_the_function_evaluates_again_and_its_file_is_named(project: Path) -> None:
    assert "evaluate_grpo  cached" in re.sub(" +", "  ", rlcore(project, "plan", "own.toml"))
    (project / "my_rewards.py").write_text(OWN.replace("1.0 if", "0.5 if"))
    said = rlcore(project, "plan", "own.toml")
    assert re.search("^evaluate_grpo +run +source files changed: my_rewards.py$", said, re.MULTILINE)
    assert re.search("^grpo +run +restarts: source files changed: my_rewards.py$", said, re.MULTILINE)
    (project / "my_rewards.py").write_text(OWN)


def test_the_preset_of_preferences_promotes_by_the_win_rate_of_a_judge_that_did_not_train_the_policy(
    project: Path,
) -> None:
    first = rlcore(project, "promote", "mine.toml")
    assert "mine-grpo version 1: Passed: the first champion" in first
    second = rlcore(project, "promote", "mine.toml", "--set", "stages.grpo.learning_rate=2e-5")
    assert "# mine-grpo: against version 1" in second
    assert "| win rate |" in second
