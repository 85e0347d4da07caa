"""People with ssh keys, and the file that allows them to approve."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlcore.tasks.store.settings import Home


def make_key(folder: Path, name: str) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed and could not be (see infra/install_programs.sh)")
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True)
    return path


def allowed(key: Path, principal: str = "", options: str = "") -> str:
    kind, text, _ = key.with_suffix(".pub").read_text(encoding="utf-8").split()
    return " ".join(filter(None, (principal or key.name, options, kind, text)))


def ask_for_approvals(home: Home, *lines: str, days: int = 7) -> None:
    """Write the file by which promotions of a state directory need an approval, by these allowed signers."""
    path = home.root / "promotion.toml"
    path.write_text(f"approvers = {json.dumps(lines)}\ndays = {days}\n", encoding="utf-8")
    path.chmod(0o600)
