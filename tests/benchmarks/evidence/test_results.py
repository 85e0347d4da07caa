"""Results on disk: every run is found under its task, arm and seed, and a wrong file is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evidence.results import by_task, read_results
from rlcore.errors import ConfigError, DataError
from tests.benchmarks.evidence.sample import arms, write


def test_runs_are_read_by_task_arm_and_seed(tmp_path: Path) -> None:
    write(tmp_path, {"fast": arms()["fast"]}, task="words")
    assert by_task(read_results(write(tmp_path, arms()))) == {"sums": arms(), "words": {"fast": arms()["fast"]}}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokkens", 1, "arms.fast.tokkens: unknown key; did you mean arms.fast.tokens"),
        ("tokens", -1, "arms.fast.tokens = -1: must be at least 0"),
        ("right", "01x", "arms.fast: right: must have only the characters 0 and 1"),
        ("right", "01", "must have the same number of held-out problems, have {'fast': 2, 'slow': 100"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = write(tmp_path, arms())[0]
    document = json.loads(path.read_text())
    document["arms"]["fast"][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as raised:
        read_results([path])
    assert raised.value.where == str(path)


def test_a_curve_rises() -> None:
    curve = arms()["fast"][0].curve
    with pytest.raises(ConfigError, match="completions: must rise"):
        replace(curve, completions=curve.completions[::-1])
    with pytest.raises(ConfigError, match=r"one value per iteration in each column, has {.*'kl': 2"):
        replace(curve, kl=(0.0, 0.1))


@pytest.mark.parametrize("text", ["{}", "[]", '{"task": "sums", "seed": 0, "arms": []}', "3"])
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "evidence-sums-0.json"
    path.write_text(text)
    with pytest.raises(DataError, match="must have a table of arms"):
        read_results([path])


def test_a_file_of_another_seed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, arms())[0]
    with pytest.raises(DataError, match="seed = 0: must be those of the file's name"):
        read_results([path.rename(tmp_path / "evidence-sums-9.json")])
