"""Data sets without a run: ``rlcore validate``, and training rows that share words with evaluation prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import DataError
from rlcore.flows.cli.app import main
from rlcore.flows.run import run_targets
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_table


def rows(path: Path, *others: str, count: int = 50) -> Path:
    """A file of sound prompts, with other lines at its end."""
    valid = [
        {
            "prompt_id": f"q{i}",
            "messages": [{"role": "user", "content": f"{i} + 1?"}],
            "reference": str(i + 1),
            "task": "s",
        }
        for i in range(count)
    ]
    path.write_text("".join(line + "\n" for line in (*map(json.dumps, valid), *others)))
    return path


def checked(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main(["validate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_valid_file_is_accepted_and_a_tenth_of_it_held_out(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "my rows.jsonl")
    code, output = checked(capsys, path, "--contract", "prompts")
    assert (code, output) == (
        0,
        f"my rows: 45 for training, 5 held out, 0 unused, 0 quarantined (prompts/v1 from {path.name})\n",
    )


def test_refused_rows_are_shown_with_line_field_and_reason_and_counted(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = json.dumps({"prompt_id": "x", "messages": [], "reference": "1", "task": "s"})
    code, output = checked(capsys, rows(tmp_path / "mine.jsonl", "{broken", empty), "--contract", "prompts")
    assert code == 1
    assert "mine: REFUSED: the dataset breaks prompts/v1: 2 of 52 rows (3.8%) are quarantined" in output
    assert "\n    line 52, messages: must be filled turns" in output
    assert len((home.root / "checks" / "mine" / "quarantine.jsonl").read_text().splitlines()) == 2

    code, output = checked(capsys, rows(tmp_path / "mine.jsonl", "{broken", count=400), "--contract", "prompts")
    assert code == 0
    assert "mine: 360 for training, 40 held out, 0 unused, 1 quarantined" in output
    assert "\n  1 x malformed JSON" in output

    rows(tmp_path / "mine2.jsonl", "{broken")
    code, output = checked(capsys, tmp_path / "mine*.jsonl", "--contract", "prompts")
    assert "\n    mine2.jsonl, line 51, row: malformed JSON" in output


def ungradable(count: int) -> list[str]:
    """Lines of prompts whose reference is a placeholder or a paragraph."""
    references = ["proof", "notfound", r"\\frac{3}{0}", "Because it is even, and every even number of this kind works."]
    return [
        f'{{"prompt_id": "bad{n}", "messages": [{{"role": "user", "content": "Show {n}."}}],'
        f' "reference": "{references[n % 3]}", "task": "s"}}'
        for n in range(count)
    ]


def test_references_that_grade_nobody_are_named_where_it_is_not_known_who_grades(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = checked(capsys, rows(tmp_path / "mine.jsonl", *ungradable(3)), "--contract", "prompts")
    assert code == 0
    assert "warning: 3 references grade no answer" in output
    for number, reason in enumerate(("is not an answer: 'proof'", "is not an answer: 'notfound'", "has no value")):
        assert f"row bad{number}: no answer can be graded with it: it {reason}" in output


def test_where_math_compares_with_them_they_are_quarantined(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "mine.jsonl", *ungradable(3), count=400)
    own = f"data.prompts.adapter=prompts data.prompts.path={path} data.prompts.num_train=60 data.prompts.num_eval=10"
    code, output = checked(capsys, "tiny", "--set", own)
    assert (code, "3 quarantined" in output) == (0, True), output
    assert "3 x no answer can be graded with it" in output
    assert "is not an answer: 'proof'" in output.replace("\\'", "'")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("mine.jsonl", "--adapter", "reasoning_gym"), 2, "the row type of 'reasoning_gym' is unknown"),
        (("mine.jsonl", "--contract", "prompt"), 2, "prompt"),
        (("mine.jsonl", "--set", "seed=1"), 2, "--set changes a preset, and mine.jsonl has rows"),
        (("mine.jsonl", "--adapter", "gsm8q"), 2, "did you mean 'gsm8k'?"),
        (("mine.jsonl", "--contract", "prompts", "--adapter", "gsm8q"), 2, "did you mean 'gsm8k'?"),
        (("mine.jsonl", "--contract", "demonstrations"), 1, "missing column 'completion'"),
        (("none.jsonl", "--contract", "prompts"), 2, "no such file"),
        (("none",), 2, "no such preset or file: none"),
    ],
)
def test_what_cannot_be_checked_is_one_error(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    rows(tmp_path / "mine.jsonl")
    monkeypatch.chdir(tmp_path)
    found, output = checked(capsys, *arguments)
    assert (found, "Traceback" in output) == (code, False)
    assert text in output and output.count("fix:") < 2


def test_datasets_of_a_preset_are_printed_with_used_and_unused_rows(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "mine.jsonl", count=100)
    own = f"data.prompts.adapter=prompts data.prompts.path={path} data.prompts.num_train=60 data.prompts.num_eval=10"
    small = "data.demonstrations.num_train=20 data.demonstrations.num_eval=4"
    sampled = "data.preferences.adapter=policy data.preferences.policy=sft"
    code, output = checked(capsys, "tiny", "--set", f"{own} {small} {sampled}")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == f"prompts: 60 for training, 10 held out, 30 unused, 0 quarantined (prompts/v1 from {path.name})"
    assert lines[1].startswith("demonstrations: 20 for training, 4 held out, 0 unused")
    assert lines[-1] == "preferences: sampled from the policy 'sft' in the run"

    code, output = checked(capsys, "tiny", "--set", f"data.prompts.path={path} {small} {sampled}")
    assert code == 1
    assert (
        f"prompts: REFUSED: path = '{path}': the adapter 'rlcore.examples.arithmetic:ADAPTER' reads no file" in output
    )


PRESET = """
extends = "rlvr_grpo"
without = ["data.demonstrations"]
name = "shared"

[model.shape]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
intermediate_size = 32
max_positions = 512

[data.prompts]
adapter = "prompts"
path = "{prompts}"
num_train = 20
num_eval = 4
max_tokens = 400

[data.demonstrations]
contract = "demonstrations"
adapter = "demonstrations"
path = "{demonstrations}"
num_train = 20
num_eval = 4
max_tokens = 400
max_quarantined = 0.2
"""
RUN = " ".join(f"word{place}" for place in range(13))
TARGETS = ("prepare_prompts", "prepare_demonstrations")


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def preset(tmp_path: Path) -> str:
    """Prompts, one of which is held out and holds the words; the third demonstration's answer has them too."""
    prompts = [
        {
            "prompt_id": f"p{n}",
            "messages": asks(f"Is {RUN} so?" if n == 20 else f"Tell me of {n}."),
            "reference": str(n),
            "task": "talk",
            "split": "eval" if n >= 20 else "train",
        }
        for n in range(24)
    ]
    demonstrations = [
        {
            "demonstration_id": f"d{n}",
            "messages": asks(f"What is {n + 50}?"),
            "completion": f"It is {RUN}." if n == 2 else f"It is {n}.",
            "reference": "",
            "task": "talk",
            "split": "eval" if n >= 20 else "train",
        }
        for n in range(24)
    ]
    paths = {
        "prompts": written(tmp_path / "prompts.jsonl", prompts),
        "demonstrations": written(tmp_path / "demonstrations.jsonl", demonstrations),
    }
    (tmp_path / "shared.toml").write_text(PRESET.format(**paths))
    return str(tmp_path / "shared.toml")


def test_an_answer_that_holds_the_words_of_an_evaluation_prompt_is_quarantined_or_refused(
    tracked_home: Home, preset: str
) -> None:
    action = ("data.demonstrations.ngram_overlap=quarantine",)
    made = tracked_home.root / run_targets(preset, action, TARGETS)["prepare_demonstrations"].uri
    (refused,) = [json.loads(line) for line in (made / "quarantine.jsonl").read_text().splitlines()]
    assert refused["line"] == 3
    assert refused["reason"].startswith("shares 13 words in a row")
    assert "in another dataset" in refused["excerpt"]
    assert RUN[:40] in refused["excerpt"]
    assert len(read_table(made / "train.parquet")) == 19

    with pytest.raises(DataError, match="training rows rejected: 1; each shares 13 words in a row"):
        run_targets(preset, ("data.demonstrations.ngram_overlap=refuse",), TARGETS)
