"""The machine of a run, known from an earlier process while nothing has changed, and asked from torch otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import HardwareConfig, to_dict
from rlcore.hardware.machine import find_machine
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.store.settings import Home

ASK = """
import json, sys
from rlcore.config import HardwareConfig
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.store.remembered import remembering
from rlcore.tasks.store.settings import find_home

with remembering(find_home().source_facts):
    found = known_machine(HardwareConfig(dtype=sys.argv[1]))
print(json.dumps([found.facts, found.warning, "torch" in sys.modules]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.cache.mkdir(parents=True)
    return made


def asked(home: Home, dtype: str = "auto", **variables: str) -> tuple[dict[str, Any], str, bool]:
    """The machine in a process of its own, its warning, and whether torch was imported."""
    environment = os.environ | {"RLCORE_HOME": str(home.root)} | variables
    command = [sys.executable, "-c", ASK, dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    facts, warning, imported = json.loads(done.stdout)
    return facts, warning, imported


def test_the_second_process_knows_the_machine_without_torch(home: Home) -> None:
    first, second = asked(home), asked(home)
    assert (first[2], second[2]) == (True, False)
    assert second[:2] == first[:2]


def test_other_instructions_and_precisions_are_other_machines(home: Home) -> None:
    usual, _, _ = asked(home)
    plain, _, imported = asked(home, ATEN_CPU_CAPABILITY="default")
    assert imported
    assert (plain["instructions"], plain["numerics_digest"] != usual["numerics_digest"]) == ("DEFAULT", True)
    half, warning, imported = asked(home, "bfloat16", ATEN_CPU_CAPABILITY="default")
    assert (half["precision"], imported) == ("bfloat16", True)
    assert "no instructions for bfloat16" in warning
    assert asked(home, "bfloat16", ATEN_CPU_CAPABILITY="default") == (half, warning, False)
    assert asked(home) == (usual, "", False)


def test_another_torch_is_another_machine(home: Home, tmp_path: Path) -> None:
    asked(home)
    own = tmp_path / "own" / "torch"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise SystemExit('the other torch was imported')")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        asked(home, PYTHONPATH=str(own.parent))
    assert "the other torch was imported" in caught.value.stderr


def test_a_process_with_torch_believes_torch() -> None:
    config = HardwareConfig(device="cpu", num_threads=3)
    assert known_machine(config).facts == to_dict(find_machine(config))
    assert known_machine(config).resolved == ("device", "dtype", "num_threads")
