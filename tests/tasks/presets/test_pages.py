"""A printed preset reads back as itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.flows.presets import FOLDER, open_preset, preset_path
from rlcore.tasks.presets.key_reference import describe, origins
from rlcore.tasks.presets.pages import as_toml
from rlcore.tasks.presets.run import load_preset
from tests.flows.micro import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_printed_preset_reads_back_as_itself(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it is printed: files are named from there
    config = open_preset(preset)
    printed = tmp_path / "printed.toml"
    printed.write_text(as_toml(describe(config), origins(preset_path(preset), FOLDER)), encoding="utf-8")
    assert load_preset(printed) == config


def test_each_key_is_printed_with_what_it_may_be_and_where_it_was_set() -> None:
    printed = as_toml(describe(open_preset("tiny", ["seed=7"])), origins(preset_path("tiny"), FOLDER, ["seed=7"]))
    lines = {line.partition(" =")[0]: line for line in printed.splitlines()}
    assert lines["seed"].split("  # ")[1] == "integer, at least 0; required; set in --set"
    assert "integer, at least 1; default 64; of the periodic" in lines["num_monitor_problems"]
    assert lines["num_monitor_problems"].endswith("set in tiny.toml")
    assert "[[stages.ppo.rewards]]" in printed
    assert "# [retrain]: left out" in printed
