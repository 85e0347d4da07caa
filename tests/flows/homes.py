"""Content of a run's state folder: records, artifacts, pages; and a run that is killed on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.flows.conftest import ROOT, environment


def record(home: Path, stage: str) -> dict[str, Any]:
    (path,) = (home / "cache" / stage).glob("*.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def folder(home: Path, stage: str) -> Path:
    return home / str(record(home, stage)["ref"]["uri"])


def weights(home: Path, stage: str) -> bytes:
    return (folder(home, stage) / "model" / "model.safetensors").read_bytes()


def without(home: Path, copy: Path, *stages: str) -> Path:
    shutil.copytree(home, copy)
    for folder in ("work", "checkpoints"):  # from which a run would continue
        shutil.rmtree(copy / folder, ignore_errors=True)
    for stage in stages:
        shutil.rmtree(copy / "cache" / stage)
    return copy


def kill_when(home: Path, pattern: str, command: Sequence[str]) -> None:
    process = subprocess.Popen(
        list(command), env=environment(home), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while not list(home.glob(pattern)):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
