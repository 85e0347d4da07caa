"""A home that release 0.7.0 made, opened by this version.

``home-0.7.0.tar.xz`` is the home of a run of the preset ``tiny`` with a model of some thousand parameters, without the
pictures. Its code is the commit f0ce1a48.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.flows.conftest import environment
from tests.flows.warm import ROOT, run_warm

FILE = Path(__file__).with_name("home-0.7.0.tar.xz")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(FILE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "home"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "tiny-grpo/1"], "tiny-grpo"),
        (["lineage", "tiny-grpo/1"], "import_sft"),
        (["plan", "tiny"], "first run of this preset by this release"),
        (["gc"], "can go"),
        (["audit", "verify"], "0 entries, no errors"),
        (["upgrade"], "every database is of the installed versions"),
    ],
)
def test_a_home_of_the_previous_release_is_read(home: Path, arguments: list[str], expected: str) -> None:
    done = run_warm(arguments, environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size <= 200_000
