"""A state directory with a little of everything that a backup has."""

from __future__ import annotations

import pytest

from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.cache import Record, StageCache, now
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.state import require_readable
from rlcore.tasks.store.storage import write_bytes, write_json


def add_result(home: Home, stage: str, content: bytes) -> ArtifactRef:
    """Store a stage's result: an artifact and its record."""
    folder = home.work / f"{stage}.output"
    write_bytes(content, folder / "model" / "weights.bin")
    write_json({"bytes": len(content)}, folder / "summary.json")
    ref = ArtifactStore(home.root).commit(folder, kind="policy")
    record = Record(key=stage, ref=ref, ingredients={}, metrics={}, code="", environment="", created=now(), seconds=1.0)
    StageCache(home.cache).write(stage, record)
    return ref


@pytest.fixture
def filled(tracked_home: Home) -> Home:
    """MLflow's database and files, two results, an interrupted stage, checkpoints, an audit log, secrets, locks."""
    home = tracked_home
    require_readable(home)
    first = add_result(home, "sft", b"first weights")
    add_result(home, "grpo", b"second weights")
    record_action(home, "promote", "tiny-grpo", {"to": 1})
    served = home.mlartifacts / "tiny" / "model.bin"
    served.parent.mkdir()
    served.hardlink_to(home.root / first.uri / "model" / "weights.bin")
    write_json({}, home.work / "key" / "inputs.json")
    write_bytes(b"{}\n", home.work / "key" / "checkpoints" / "history.jsonl")
    write_json({}, home.checkpoints / "tiny" / "grpo" / "inputs.json")
    write_bytes(b"partial", home.mlartifacts / "tiny" / ".artifact.uploading.1")
    write_bytes(b"secret", home.prefect / "profiles.toml")
    (home.root / "audit.lock").touch()
    return home
