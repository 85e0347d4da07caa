"""Results on disk: what is written is read, and a wrong file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evidence.results import Arm, path_of, read_results, write_results
from rlcore.errors import ConfigError, DataError
from tests.benchmarks.evidence.sample import results


def test_what_is_written_is_read_with_a_run_per_line(tmp_path: Path) -> None:
    write_results(results(), tmp_path)
    assert read_results(path_of("sums", tmp_path)) == results()
    lines = path_of("sums", tmp_path).read_text().splitlines()
    assert sum(line.lstrip().startswith(('"0"', '"1"', '"2"')) for line in lines) == 7


def test_a_run_takes_the_place_of_its_earlier_one() -> None:
    changed = results().with_arm("fast", 1, Arm(tokens=7))
    assert changed.arms["fast"]["1"].tokens == 7
    assert len(changed.arms["fast"]) == 3
    assert changed.arms["slow"] == results().arms["slow"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokkens", 1, "arms.fast.0.tokkens: unknown key; did you mean arms.fast.0.tokens"),
        ("tokens", -1, "arms.fast.0.tokens = -1: must be at least 0"),
        ("right", "01x", "arms.fast.0: right: must have only the characters 0 and 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path, key: str, value: object, message: str) -> None:
    write_results(results(), tmp_path)
    path = path_of("sums", tmp_path)
    document = json.loads(path.read_text())
    document["arms"]["fast"]["0"][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as raised:
        read_results(path)
    assert raised.value.where == str(path)


def test_arms_of_a_seed_have_the_same_problems_and_curves_rise() -> None:
    with pytest.raises(ConfigError, match=r"seed 2 must have the same held-out problems"):
        results().with_arm("start", 2, Arm(right="01"))
    points = results().arms["fast"]["0"].curve
    with pytest.raises(ConfigError, match="completions must rise"):
        Arm(curve=points[::-1])
