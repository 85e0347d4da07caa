"""Snapshots against accepted ones: what is excused, what is missing, what the page says, and real preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlcore.data_contracts.drift.sketches import sketch
from rlcore.errors import StorageError
from rlcore.tasks.kinds.drift.page import render
from rlcore.tasks.kinds.drift.step import compare_snapshots
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.presets.settings import DriftConfig
from rlcore.tasks.steps.data import prepare_dataset
from rlcore.tasks.store.storage import read_json, write_json
from tests.tasks.steps.token_views import words_view

SHARED = Path(__file__).parents[5] / "shared" / "data"
CALM, MOVED = "a" * 64, "b" * 64


def snapshot(folder: Path, digest: str, sources: list[str], lengths: list[int]) -> Path:
    folder.mkdir()
    frame = pd.DataFrame({"source": sources, "chosen_tokens": lengths, "rejected_tokens": lengths})
    write_json({"digest": digest, "sketches": sketch(frame)}, folder / "report.json")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    before = snapshot(tmp_path / "before", CALM, ["web"] * 300 + ["book"] * 100, [20] * 400)
    after = snapshot(tmp_path / "after", MOVED, ["web"] * 100 + ["we|b"] * 300, [20] * 200 + [200] * 200)
    return before, after


def test_the_page_names_each_column_that_moved_and_how(folders: tuple[Path, Path]) -> None:
    before, after = folders
    found = compare_snapshots("prepare_preferences", after, before, DriftConfig())
    assert found.level == "refuse"
    page = render([found])
    assert "## preferences: refuse" in page
    assert "| source | **refuse** |" in page
    assert "we\\|b 0.0% → 75.0%; web 75.0% → 25.0%; book 25.0% → 0.0%" in page
    # 400 of 20 tokens, then 200 of 20 and 200 of 200: mean 110, half of the rows move from one bin to another.
    assert "| chosen_tokens | **refuse** |" in page
    assert "| 0.500 |" in page
    assert "20.0 → 110.0" in page
    assert "| chosen_is | calm | 0.000 |" in page


def test_rows_that_a_person_has_accepted_warn_and_pass(folders: tuple[Path, Path]) -> None:
    before, after = folders
    accepted = DriftConfig(accepted=(MOVED[:12],))
    found = compare_snapshots("prepare_preferences", after, before, accepted)
    assert (found.level, found.is_excused) == ("warn", True)
    assert "accepted by a person" in render([found])
    assert compare_snapshots("prepare_preferences", before, after, accepted).level == "refuse"


def told(folder: Path, digest: str, sketches: dict[str, Any]) -> Path:
    folder.mkdir()
    write_json({"digest": digest, "sketches": sketches}, folder / "report.json")
    return folder


def test_the_same_rows_are_calm(folders: tuple[Path, Path]) -> None:
    found = compare_snapshots("prepare_prompts", folders[0], folders[0], DriftConfig())
    assert found.level == "calm"
    assert "the accepted rows, unchanged" in render([found])


def test_what_cannot_be_compared_is_refused_until_a_person_accepts_the_rows(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """No accepted data of that name, an account without columns, columns that are gone or are counted otherwise."""
    before, _ = folders
    kept = read_json(before / "report.json")["sketches"]
    empty = told(tmp_path / "empty", "0" * 64, {})
    fewer = told(tmp_path / "fewer", "1" * 64, {name: kept[name] for name in kept if name != "source"})
    other = told(tmp_path / "other", "2" * 64, kept | {"chosen_tokens": {**kept["chosen_tokens"], "edges": [1, 2]}})
    pairs = [(before, None), (before, empty), (fewer, before), (other, before)]
    said = ["trained on no data of that name", "no column can be compared", "source (cannot", "(cannot be compared)"]
    for (new, accepted), words in zip(pairs, said, strict=True):
        found = compare_snapshots("prepare_preferences", new, accepted, DriftConfig())
        assert found.level == "refuse"
        assert words in render([found])
        excused = DriftConfig(accepted=(found.new[:12],))
        assert compare_snapshots("prepare_preferences", new, accepted, excused).level == "warn"
    with pytest.raises(StorageError) as caught:
        compare_snapshots("prepare_preferences", before, tmp_path / "gone", DriftConfig())
    assert "gone" in caught.value.where


def test_a_column_that_the_new_rows_alone_have_is_named_and_stops_nothing(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = read_json(folders[0] / "report.json")["sketches"]
    fewer = told(tmp_path / "fewer", "1" * 64, {name: kept[name] for name in kept if name != "source"})
    found = compare_snapshots("prepare_preferences", folders[0], fewer, DriftConfig())
    assert (found.level, found.left_out) == ("calm", ("source",))
    assert "the accepted rows have none: source" in render([found])


def test_many_sources_without_drift_pass_and_pairs_of_one_prompt_do_not_count_as_many(tmp_path: Path) -> None:
    """60 equally likely sources; each prompt has ten pairs, which share source and lengths. 12 pairs of datasets."""
    generator = np.random.default_rng(0)
    for number in range(12):
        folders = []
        for side in ("old", "new"):
            sources, lengths = generator.integers(0, 60, 400), generator.geometric(0.02, 400)
            rows = {"source": sources.astype(str), "chosen_tokens": lengths, "rejected_tokens": lengths[::-1]}
            frame = pd.DataFrame({"prompt_hash": np.arange(400).astype(str), **rows}).loc[np.repeat(range(400), 10)]
            folder = tmp_path / f"{side} {number}"
            folder.mkdir()
            write_json(
                {"digest": folder.name, "sketches": sketch(frame.reset_index(drop=True))}, folder / "report.json"
            )
            folders.append(folder)
        assert compare_snapshots("prepare_preferences", folders[1], folders[0], DriftConfig()).level == "calm"


def prepared(folder: Path, rows: list[dict[str, Any]]) -> Path:
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder.mkdir()
    settings = DatasetConfig(
        contract="preference_pairs",
        adapter="alpaca_eval",
        path=str(source),
        num_train=1000,
        num_eval=200,
        max_tokens=2048,
    )
    prepare_dataset("preferences", settings, seed=0, tokens=words_view(4), folder=folder)
    return folder


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real files in ../shared/data are not here")
def test_two_halves_of_real_preferences_are_calm_and_the_longest_half_is_refused(tmp_path: Path) -> None:
    lines = (SHARED / "preferences_alpaca_eval.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    even, odd = (prepared(tmp_path / name, rows[start::2]) for name, start in (("even", 0), ("odd", 1)))
    assert compare_snapshots("prepare_preferences", odd, even, DriftConfig()).level == "calm"
    longest = sorted(rows, key=lambda row: -len(str(row)))[: len(rows) // 2]
    found = compare_snapshots("prepare_preferences", prepared(tmp_path / "long", longest), even, DriftConfig())
    assert found.level == "refuse"
    levels = {one.column: one.level for one in found.columns if one.level != "calm"}
    assert levels == {"chosen_tokens": "refuse", "rejected_tokens": "warn"}  # the chosen side is the longer one
