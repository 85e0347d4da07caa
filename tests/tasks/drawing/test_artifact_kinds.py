from __future__ import annotations

from pathlib import Path

from rlcore.tasks.drawing.artifact_kinds import rejections, reward_models, rl_runs


def test_each_kind_is_found_by_its_own_file_in_the_order_of_the_stages(tmp_path: Path) -> None:
    files = {
        "second": "health.json",
        "rm": "reliability.json",
        "kept": "rejection.json",
        "first": "health.json",
        "sft": "curve.json",
    }
    folders = {name: tmp_path / name for name in files}
    for name, file in files.items():
        folders[name].mkdir()
        (folders[name] / file).write_text("{}", encoding="utf-8")
    assert list(rl_runs(folders)) == ["second", "first"]
    assert rl_runs(folders)["first"] == tmp_path / "first"
    assert list(reward_models(folders)) == ["rm"]
    assert list(rejections(folders)) == ["kept"]


def test_a_folder_of_that_name_is_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "health.json").mkdir()
    assert rl_runs({"grpo": tmp_path, "gone": tmp_path / "gone"}) == {}
