"""The home of a real run, backed up, deleted, and restored at another path: what a user does with it afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.flows.conftest import environment, flows_arguments, states_of
from tests.flows.warm import ROOT, run_warm

MODEL = "tiny-grpo/1"


@pytest.fixture(scope="module")
def restored(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's home at another path; the original is away while the tests use it."""
    target, home = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("other machine") / "home"
    done = run_warm(["backup", str(target)], environment(micro_home), ROOT)
    assert done.returncode == 0, done.stderr
    done = run_warm(["restore", str(target)], environment(home) | {"TEST_NO_DATABASE": "1"}, ROOT)
    assert done.returncode == 0, done.stderr
    assert "every digest is right" in done.stdout
    assert "prove it: rlcore reproduce tiny-" in done.stdout
    shutil.rmtree(target)
    return home


@pytest.fixture
def away(micro_home: Path) -> object:
    aside = micro_home.with_name("aside")
    micro_home.rename(aside)
    yield
    aside.rename(micro_home)


@pytest.mark.usefixtures("away")
def test_nothing_is_computed_again_and_the_lineage_is_there(restored: Path) -> None:
    planned = run_warm(flows_arguments("plan"), environment(restored), ROOT)
    assert set(states_of(planned.stdout).values()) == {"cached"}, planned.stdout + planned.stderr
    lineage = run_warm(["lineage", MODEL], environment(restored), ROOT)
    assert "import_sft" in lineage.stdout, lineage.stderr
    shown = run_warm(["show", MODEL], environment(restored), ROOT)
    assert "tiny-grpo" in shown.stdout, shown.stderr
    verified = run_warm(["audit", "verify"], environment(restored), ROOT)
    assert "1 entries, no errors; it was not compared with the backup " in verified.stdout, verified.stderr


@pytest.mark.usefixtures("away")
def test_a_second_backup_of_the_restored_home_is_possible(restored: Path, tmp_path: Path) -> None:
    done = run_warm(["backup", str(tmp_path)], environment(restored), ROOT)
    assert done.returncode == 0, done.stderr
    last = json.loads((restored / "backups" / "last.json").read_text())
    assert last["target"] == str(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("away")
def test_a_version_comes_out_the_same_after_the_restore(restored: Path) -> None:
    done = run_warm(["reproduce", MODEL], environment(restored), ROOT)
    assert "every file of the model is the same" in done.stdout, done.stdout + done.stderr
