"""The notebooks of ``examples``, from the first cell to the last."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.cli import app
from tests.flows.conftest import environment
from tests.flows.warm import run_warm

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


def main(arguments: Sequence[str]) -> int:
    """Run a script in the warm process; commands of rlcore that it starts are called in this process."""
    start = subprocess.run

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if list(command[:3]) != [sys.executable, "-m", "rlcore.flows"]:
            return start(command, **options)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = app.main(command[3:])
        return subprocess.CompletedProcess(command, code, output.getvalue(), "")

    subprocess.run = run  # type: ignore[assignment]
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs before you commit"
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), "utf-8")
    variables = environment(tmp_path / "home") | {"MPLBACKEND": "Agg"}
    done = run_warm([str(script)], variables, tmp_path, call="tests.examples.test_notebooks:main")
    assert done.returncode == 0, done.stdout + done.stderr
