"""A preset's name is a part of paths, of experiments and of models: one with a dot works from the run to the export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, environment, run_flows
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

NAME = "tiny-v1.2"


@pytest.mark.slow  # ten seconds of the processor; tests of the registry and of promotion have such names too
def test_a_name_with_a_dot_works_from_the_run_to_the_export(micro_home: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(micro_home, tmp_path / "home"))
    done = run_flows("run", home, f"name={NAME}")
    assert done.returncode == 0, done.stderr
    assert (home / "pages" / NAME / "compare").is_dir()
    overrides = [part for each in (*MICRO, f"name={NAME}") for part in ("--set", each)]
    shown = run_warm(["show", "tiny", *overrides], environment(home), ROOT)
    (report,) = [line.split(maxsplit=1)[1] for line in shown.stdout.splitlines() if line.startswith("report ")]
    assert f"<title>{NAME}: run report</title>" in Path(report).read_text(encoding="utf-8")
    exported = run_warm(["export", f"{NAME}-grpo/1", str(tmp_path / "out")], environment(home), ROOT)
    assert exported.returncode == 0, exported.stderr
    assert f"# `{NAME}-grpo`" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../../X", "/X", "."])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    home = tmp_path / "deep" / "home"
    done = run_flows("run", home, f"name='{name}'")
    assert done.returncode == 2, done.stderr
    assert f"name = {name!r}: names folders and models" in done.stderr
    made = [path for path in tmp_path.rglob("*") if path.name == "X" or path.suffix == ".json"]
    assert [path for path in made if path != home / "versions.json"] == []  # what opened the home
