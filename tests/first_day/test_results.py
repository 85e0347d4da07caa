"""Results of the first day: messages of runs that go wrong, own verifiers, and promotions of presets to extend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.judge_server import serving

pytestmark = pytest.mark.slow


MESSAGES_PRESET = """name = "mine"
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
    messages = [{"role": "user", "content": question or f"What is {number}+{3 * number}?"}]
    return json.dumps({"messages": messages, "reference": str(4 * number), "task": "sums", **fields}) + "\n"


@dataclass(frozen=True, kw_only=True)
class Done:
    """Output of a command, and its exit code."""

    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The user's folder, with its state."""

    folder: Path

    def rlcore(self, *arguments: str) -> Done:
        done = run_warm([*arguments], environment(self.folder / ".rlcore"), self.folder)
        return Done(code=done.returncode, text=done.stdout + done.stderr)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("messages")
    prompts = (row(number, prompt_id=f"q{number}") for number in range(32))
    demonstrations = (
        row(number, demonstration_id=f"d{number}", completion=str(4 * number)) for number in range(100, 120)
    )
    (folder / "prompts.jsonl").write_text("".join(prompts))
    (folder / "demonstrations.jsonl").write_text("".join(demonstrations))
    (folder / "mine.toml").write_text(MESSAGES_PRESET)
    return Folder(folder=folder)


@pytest.fixture(scope="module")
def run(messages: Folder) -> Done:
    done = messages.rlcore("run", "mine.toml")
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


def test_show_and_the_report_tell_that_a_model_did_not_change(run: Done, messages: Folder) -> None:
    shown = messages.rlcore("show", "mine.toml").text
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


def test_a_learning_rate_that_wrecks_the_policy_is_named_and_not_called_solved(run: Done, messages: Folder) -> None:
    (messages.folder / "my_digits.py").write_text(DIGITS)
    changes = (
        "learning_rate=1.0",
        "update.lora.rank=0",
        "num_iterations=6",
        "sampling.max_new_tokens=8",
        "rewards=[{kind='my_digits:digits'}]",
    )
    overrides = [part for change in changes for part in ("--set", f"stages.grpo.{change}")]
    text = messages.rlcore("run", "mine.toml", *overrides).text
    assert "warning: stages.grpo.learning_rate = 1.0: recipes have at most 0.1" in text
    alarms = [line for line in text.splitlines() if "health alarm: " in line and "policy did not change" not in line]
    assert alarms
    assert all("the update was too large (learning_rate = 1): entropy " in line for line in alarms)
    assert "fix: lower learning_rate, and start again" in text and "are solved" not in text


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


def rating_of(body: Mapping[str, Any]) -> str:
    """Rate 8 of 10 what has an even number of characters between the fences, else 3."""
    text = body["messages"][-1]["content"]
    nonce = re.findall(r"<rating (\w+)>", text)[-1]
    answer = re.findall(rf"\[answer {nonce}\]\n(.*)\n\[end of answer {nonce}\]", text, re.DOTALL)[0]
    return f"<rating {nonce}>{3 if len(answer) % 2 else 8}</rating>"


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with serving(rating_of) as (_, url):
        yield url


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def question(number: int) -> dict[str, object]:
    return {"prompt_id": f"p{number}", "messages": [{"role": "user", "content": f"{number} + {number}"}], "task": "t"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, judge: str) -> Path:
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
    done = run_warm(arguments, environment(folder / ".rlcore"), folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def answers_of(folder: Path, checkpoint: str) -> pd.DataFrame:
    cache = folder / ".rlcore" / "cache" / f"evaluate_{checkpoint}"
    record = max(cache.glob("*.json"), key=lambda path: path.stat().st_mtime)
    uri = json.loads(record.read_text())["ref"]["uri"]
    table = pd.read_parquet(folder / ".rlcore" / uri / "answers.parquet")
    return table.assign(dataset=table["prompt_id"].str.partition("/")[0])


def test_an_own_function_a_judge_and_a_reward_model_decide_on_held_out_answers_and_on_the_promotion(
    project: Path,
) -> None:
    output = rlcore(project, "promote", "own.toml")
    assert "own-grpo version 1: Passed: the first champion" in output
    table = answers_of(project, "grpo")
    assert table["is_graded"].all() and set(table["dataset"]) == {"prompts", "talk", "more"}
    own, talk, more = (table[table["dataset"] == name] for name in ("prompts", "talk", "more"))
    assert own["correct"].tolist() == [len(text) < 10 for text in own["completion"]]
    assert set(talk["value"]) <= {0.3, 0.8} and talk["correct"].tolist() == (talk["value"] > 0.7).tolist()
    assert more["correct"].tolist() == (more["value"] >= 0.0).tolist() and more["value"].nunique() > 1
    assert re.search(r"grpo: iteration 2/2 .* eval_accuracy=0\.\d+", output)
    assert "nothing to do: version 1 of own-grpo" in rlcore(project, "retrain", "own.toml")
    again = rlcore(project, "promote", "own.toml", "--set", "stages.grpo.learning_rate=2e-5")
    assert "# own-grpo: against version 1" in again
    assert "**Refused: accuracy changes by " in again


def test_the_preset_of_preferences_promotes_by_the_win_rate_of_a_judge_that_did_not_train_the_policy(
    project: Path,
) -> None:
    first = rlcore(project, "promote", "mine.toml")
    assert "mine-grpo version 1: Passed: the first champion" in first
    second = rlcore(project, "promote", "mine.toml", "--set", "stages.grpo.learning_rate=2e-5")
    assert "# mine-grpo: against version 1" in second
    assert "| win rate |" in second
