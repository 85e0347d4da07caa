"""People with ssh keys, and the file that allows them to approve."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_key(folder: Path, name: str) -> Path:
    """A private key without a passphrase."""
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True)
    return path


def allowed(key: Path, principal: str = "", options: str = "") -> str:
    """A line of allowed signers."""
    kind, text, _ = key.with_suffix(".pub").read_text(encoding="utf-8").split()
    return " ".join(filter(None, (principal or key.name, options, kind, text)))
