"""The cache's records: what is written is found again, and what cannot be read counts as absent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache, describe_machine

RECORD = Record(
    key="abc",
    ref=ArtifactRef(kind="checkpoint", uri="artifacts/sft/abc", sha256="0" * 64, bytes=12),
    ingredients={"seed": 1, "sections": {"sft.lr": 0.1}},
    metrics={"loss": 0.5},
    code="deadbeef",
    environment="1" * 64,
    created="2026-01-02T03:04:05.678+00:00",
    seconds=1.5,
)


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "sft" / "abc.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_record_comes_back_as_it_was_and_by_its_own_key_alone(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    assert cache.find("sft", "abc") == RECORD
    assert cache.find("sft", "abd") is None
    assert cache.find("grpo", "abc") is None


def test_the_records_of_a_stage_are_all_of_its_own(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    later = dataclasses.replace(RECORD, key="def")
    for stage, record in (("sft", later), ("sft", RECORD), ("grpo", RECORD)):
        cache.write(stage, record)
    assert cache.records("sft") == (RECORD, later)
    assert cache.records("evaluate_base") == ()


def test_a_record_that_says_another_thing_than_was_written_counts_as_absent(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    path = tmp_path / "sft" / "abc.json"
    written = path.read_bytes()
    for place in range(len(written)):  # every bit that could flip, but for one that changes blanks alone
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert cache.find("sft", "abc") in (None, RECORD)
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "abc.json").write_bytes(written)
    assert cache.find("grpo", "abc") is None  # another stage's result
    (tmp_path / "sft" / "def.json").write_bytes(written)
    assert cache.find("sft", "def") is None
    path.write_bytes(written)
    edited(tmp_path, metrics={"loss": 0.4})
    assert cache.find("sft", "abc") is None


OTHER_FORMS = [{"format": 1}, {"format": 99}, {"ref": {"kind": "checkpoint"}}, {"ref": {}}, {"ref": None}]


@pytest.mark.parametrize("changes", [*OTHER_FORMS, "", "{", "[]"])
def test_a_record_of_another_form_counts_as_absent(tmp_path: Path, changes: dict[str, Any] | str) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    if isinstance(changes, str):
        (tmp_path / "sft" / "abc.json").write_text(changes)
    else:
        edited(tmp_path, **changes)
    assert cache.find("sft", "abc") is None
    assert cache.records("sft") == ()


def test_a_machine_is_a_line_of_what_is_known_of_it() -> None:
    machine = {"device": "cpu", "precision": "float32", "accelerator": "", "threads": 1}
    assert describe_machine(machine) == "device=cpu precision=float32 threads=1"
    assert describe_machine({}) == ""
