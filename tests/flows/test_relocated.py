"""The home of a finished run, copied or moved: the copy works by itself, and the original stays as it is."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import environment, run_flows
from tests.flows.warm import ROOT, run_warm

FIRST = ("promotion.min_accuracy=0.0", "promotion.max_truncated=1.0")
ASK = """
import warnings
warnings.simplefilter("ignore")
import mlflow
from rlcore.tasks.store.settings import configure_environment, find_home
configure_environment(find_home())
chat = mlflow.transformers.load_model("models:/tiny-grpo@champion")
print(repr(chat([{"role": "user", "content": "3+4"}], max_new_tokens=8, return_full_text=False)[0]["generated_text"]))
"""


@pytest.fixture
def copy(micro_home: Path, tmp_path: Path) -> Path:
    shutil.copytree(micro_home, tmp_path / "another place" / "home")
    return tmp_path / "another place" / "home"


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_a_run_in_a_copy_leaves_every_byte_of_the_original(micro_home: Path, copy: Path) -> None:
    before = digests(micro_home)
    done = run_flows("run", copy, "evaluation.num_problems=20")
    assert done.returncode == 0, done.stderr
    assert digests(micro_home) == before
    assert f"file locations in MLflow to {copy}" in done.stderr


@pytest.mark.slow
def test_a_moved_home_promotes_tells_the_lineage_and_loads_its_champion(micro_home: Path, copy: Path) -> None:
    aside = micro_home.with_name("aside")
    micro_home.rename(aside)
    try:
        promoted = run_flows("promote", copy, *FIRST)
        assert promoted.returncode == 0, promoted.stderr
        lineage = run_warm(["lineage", "tiny-grpo@champion"], environment(copy), ROOT)
        assert "import_sft" in lineage.stdout, lineage.stderr
        asked = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, env=environment(copy), cwd=ROOT, check=False
        )
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.strip().startswith("'")
        assert not micro_home.exists()
    finally:
        shutil.rmtree(micro_home, ignore_errors=True)
        aside.rename(micro_home)
    (card,) = [
        text
        for path in copy.glob("mlartifacts/tiny/models/*/artifacts/model_card.md")
        if "# `tiny-grpo`" in (text := path.read_text())
    ]
    assert "It became champion." in card
    assert "The whole evaluation on held-out problems:" in card
    assert "No decision yet" not in card
