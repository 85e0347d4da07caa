"""Data as people have them: a file is recognized, its mapping pasted, and its other columns reach the rewards."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.data_contracts.adapters.convert import first_rows
from rlcore.data_contracts.gate.reading import read_source
from rlcore.flows.cli.app import main
from rlcore.models.importing import import_model
from rlcore.tasks.store.settings import Home
from tests.layout_rows import EXAMPLES, asked

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=256)
PRESET = """extends = "chat"
name = "mine"
[model]
source = "folder"
path = "model"
license = "MIT"
[data.prompts]
columns = { prompt = "question", reference = "extra.answer" }
drop_columns = ["note"]
path = "rows.parquet"
num_train = 40
num_eval = 10
max_tokens = 200
[stages.grpo]
num_iterations = 2
prompts_per_iteration = 2
group_size = 2
sampling.max_new_tokens = 8
eval_every = 2
rewards = [
  { kind = "my_rewards:hard" },
  { kind = "my_rewards:solved", weight = 0.5 },
]
[evaluation]
num_problems = 4
num_monitor_problems = 4
max_new_tokens = 8
"""
REWARDS = """
def hard(rollouts):
    assert all("note" not in rollout.row for rollout in rollouts)
    return [rollout.row["difficulty"] / 10 for rollout in rollouts]

def solved(prompts, completions, difficulty, **columns):
    assert all(isinstance(text, str) for text in prompts + completions)
    assert set(columns) == {"completion_ids", "question", "extra", "tags"} - {"question"}
    return [float(len(text) % 2) + level / 100 for text, level in zip(completions, difficulty)]
"""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    return path


def validated(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["validate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("name", ["GSM8K", "verl", "oasst1"])  # of all: tests/data_contracts/adapters/test_layouts.py
def test_a_public_layout_is_recognized_and_all_its_rows_are_taken(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows = [row for number in range(5, 35) for row in EXAMPLES[name].rows(number)]
    ending = ".parquet" if name in ("verl", "DAPO", "LMSYS-Chat") else ".jsonl"
    code, said = validated(capsys, write(tmp_path / f"rows{ending}", rows))
    assert (code, "Traceback" in said) == (0, False), said
    assert "27 for training, 3 held out, 0 unused, 0 quarantined" in said
    adapter = {"dapo": "verl"}.get(EXAMPLES[name].adapter, EXAMPLES[name].adapter)
    assert f'\n  adapter = "{adapter}"\n' in said


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_the_printed_mapping_is_a_line_of_a_preset(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    rows = [{"problem": asked(number), "answer": number + number * number} for number in range(30)]
    code, said = validated(capsys, write(tmp_path / f"rows{ending}", rows))
    assert code == 0
    (line,) = [line.partition(", the same as ")[2] for line in said.splitlines() if "columns = {" in line]
    assert tomllib.loads(line) == {"columns": {"prompt": "problem", "reference": "answer"}}


def test_an_unknown_layout_is_listed_with_its_types_and_a_mapping_to_complete(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"the_query": asked(n), "gold": {"expected_value": n}, "tags": ["a"]} for n in range(9)]
    code, said = validated(capsys, write(tmp_path / "rows.jsonl", rows))
    assert code == 1
    assert "columns the_query (a text), gold.expected_value (a number), tags (a list)" in said
    assert 'columns = { prompt = "the_query", reference = "gold.expected_value" }' in said


def test_a_file_against_a_contract_that_it_is_not_in_names_the_layout_that_fits(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for number in range(30) for row in EXAMPLES["GSM8K"].rows(number)]
    code, said = validated(capsys, write(tmp_path / "rows.jsonl", rows), "--contract", "prompts")
    assert code == 1
    assert "missing column 'reference'; there are answer, question" in said
    assert 'adapter = "gsm8k"' in said


@pytest.mark.slow
def test_rewards_of_a_run_read_the_columns_of_the_users_rows(tmp_path: Path) -> None:
    import_model(ModelConfig(source="scratch", shape=SHAPE), tmp_path / "model", seed=0)
    rows = [
        {"question": asked(n), "extra": {"answer": n}, "difficulty": n % 7, "tags": ["a"], "note": "x"}
        for n in range(50)
    ]
    write(tmp_path / "rows.parquet", rows)
    (tmp_path / "mine.toml").write_text(PRESET)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    ours = ("PREFECT_", "MLFLOW_", "RLCORE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = kept | {"PYTHONPATH": str(ROOT), "RLCORE_ENGINE": "inline"}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore.flows", "run", "mine.toml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tables = [path for path in (tmp_path / ".rlcore").rglob("*.parquet") if "parts" in pq.read_schema(path).names]
    scored = [row for path in tables for row in pq.read_table(path).to_pylist()]
    assert len(scored) >= 2 * 2 * 2  # also in the work folder
    for row in scored:
        level, parts = int(row["reference"]) % 7, json.loads(row["parts"])
        assert parts["hard"] == level / 10
        assert parts["solved"] == len(row["text"]) % 2 + level / 100


def test_a_system_column_beside_the_conversation_is_kept(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"from": "user", "value": "Hi?"}, {"from": "assistant", "value": "Yo."}]
    rows = [{"system": "Be a pirate.", "conversations": [{**turns[0], "value": asked(n)}, turns[1]]} for n in range(30)]
    path = write(tmp_path / "rows.jsonl", rows)
    assert validated(capsys, path)[0] == 0
    for kind in ("prompts", "demonstrations"):
        made = first_rows(read_source(path), kind, adapter="sharegpt", limit=30).rows
        assert [row["messages"][0] for row in made] == [{"role": "system", "content": "Be a pirate."}] * 30


def test_pairs_without_a_common_beginning_are_no_layout_and_a_long_column_does_not_hide_one(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"input": asked(n), "chosen": f"{n} is it.", "rejected": f"Maybe {n}."} for n in range(30)]
    code, said = validated(capsys, write(tmp_path / "pairs.jsonl", pairs))
    assert (code, "trl_preference_implicit" in said) == (1, False)
    rows = [{"problem": asked(n), "answer": n, "traces": "x" * 100_001} for n in range(30)]
    code, said = validated(capsys, write(tmp_path / "rows.jsonl", rows))
    assert code == 1
    assert 'adapter = "problems"' in said
    assert "'traces' is the longest: name it in drop_columns" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", "", "there are no rows"),
        ("rows.csv", "problem,answer\n", "there are no rows"),
        ("rows.json", "[]", "there are no rows"),
        ("rows.jsonl", '{"problem": NaN}\n', "none of the first 1 lines is a row; line 1: NaN is not JSON"),
        ("rows.txt", "Why?", "the ending '.txt' names no format"),
    ],
)
def test_a_file_without_rows_says_so(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    (tmp_path / name).write_text(content)
    code, text = validated(capsys, tmp_path / name)
    assert code != 0
    assert said in text


def test_the_mapping_to_complete_has_both_sides_of_a_pair_and_whole_words(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"labelling_prompt": ["x"], "input": asked(n), "chosen": "It is.", "rejected": "No."} for n in range(9)]
    _, said = validated(capsys, write(tmp_path / "pairs.jsonl", pairs))
    assert 'columns = { prompt = "input", chosen = "chosen", rejected = "rejected" }' in said
    rows = [{"prompt": asked(n), "answers_left": 3, "answer": n} for n in range(30)]
    code, said = validated(capsys, write(tmp_path / "rows.jsonl", rows))
    assert code == 0
    assert 'reference answer: columns = { prompt = "prompt", reference = "answer" }' in said


def code_rows(n: int) -> dict[str, Any]:
    tests = json.dumps({"inputs": [str(n)], "outputs": ["2"]})
    return {"is_prompt": True, "statement": asked(n), "input_output": tests, "solution": f"def f(x):\n    return {n}"}


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        (code_rows, {"prompt": "?", "reference": "?"}),
        (lambda n: {**code_rows(n), "query": asked(n)}, {"prompt": "query", "reference": "?"}),
        (lambda n: {"prompt": n % 2 == 0, "task": "sums", "answer": n}, {"prompt": "?", "reference": "answer"}),
        (lambda n: {"q": asked(n), "label": n % 2 == 0, "expected": None}, {"prompt": "?", "reference": "?"}),
        (lambda n: {"text": asked(n), "solution": "The capital is Paris"}, {"prompt": "text", "reference": "solution"}),
    ],
)
def test_the_mapping_to_complete_names_texts_as_prompts_and_references_that_grade(
    home: Home,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: Callable[[int], dict[str, Any]],
    mapping: dict[str, str],
) -> None:
    code, said = validated(capsys, write(tmp_path / "rows.jsonl", [row(n) for n in range(9)]))
    assert code == 1
    assert tomllib.loads(said.splitlines()[-1].strip()) == {"columns": mapping}
