"""The worker's folder as a server gets it: it needs nothing of rlcore.

tests/integration/test_vllm.py has vLLM's own workers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config import EngineConfig
from rlcore.sampling.vllm.client import Address
from rlcore.sampling.vllm.process import ServerProcess, ServerSpec, command

# vLLM's modules, as far as the worker reads them when it is imported, and vLLM's way to find the class.
VLLM = """
class WeightTransferEngine: ...
class WeightTransferEngineFactory:
    names = []
    register_engine = classmethod(lambda cls, name, engine: cls.names.append(name))
"""
BASE = "class WeightTransferInitInfo: ...\nclass WeightTransferUpdateInfo: ..."
FIND = """
import importlib, sys
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
module, _, name = sys.argv[1].rpartition(".")
found = getattr(importlib.import_module(module), name)
print(found.__name__, *WeightTransferEngineFactory.names, "with" if "rlcore" in sys.modules else "without", "rlcore")
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with those modules."""
    package = tmp_path / "site" / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(VLLM, encoding="utf-8")
    (package / "base.py").write_text(BASE, encoding="utf-8")
    return tmp_path / "site"


def found(name: str, cwd: Path, *folders: Path) -> str:
    """Return vLLM's lookup of a worker class in an interpreter that sees these folders."""
    path = ":".join(str(folder) for folder in folders)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIND, name], env=environment, cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_servers_folder_holds_the_worker_that_its_command_names_and_rlcore_is_not_needed(
    checkpoint: Path, vllm: Path, tmp_path: Path
) -> None:
    spec = ServerSpec(
        model=checkpoint,
        weight_dir=tmp_path,
        config=EngineConfig(kind="vllm", python="true"),
        dtype="float32",
        max_model_len=128,
        max_concurrent=1,
    )
    line = command(spec, "python", Address("127.0.0.1", 1))
    server = ServerProcess(spec)
    name = line[line.index("--worker-extension-cls") + 1]
    said = found(name, tmp_path, server.folder, vllm)
    server.stop()
    assert said == "WeightReceiver shared_memory gloo without rlcore"
