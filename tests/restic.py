"""Backups by restic: the commands of docs/operations.md, taken from the page, on a home and repository of a test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE | re.DOTALL)
_ONCE, _NIGHTLY, _RESTORE = (block for block in _BLOCKS if "restic " in block)


@dataclass(frozen=True)
class Page:
    """The page's commands. ``folder``: of the repository and the password; ``variables``: of a user's shell."""

    folder: Path
    variables: Mapping[str, str]

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    def begin(self, home: Path) -> None:
        self._run(_ONCE, home)

    def back_up(self, home: Path) -> None:
        self._run(self._exports + _NIGHTLY, home)

    def restore(self, home: Path) -> str:
        return self._run(self._exports + _RESTORE, home)

    def check(self, home: Path) -> str:
        (line,) = (each for each in _NIGHTLY.splitlines() if each.startswith("restic check"))
        return self._run(self._exports + line, home)

    @property
    def _exports(self) -> str:
        return "".join(f"{line}\n" for line in _ONCE.splitlines() if line.startswith("export"))

    def _run(self, commands: str, home: Path) -> str:
        programs = self.folder / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        (programs / "rlcore").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlcore.flows "$@"\n')
        (programs / "rlcore").chmod(0o755)
        places = commands.replace("/srv/rlcore", str(home)).replace("/mnt/backups/rlcore", str(self.repository))
        own = {"HOME": str(self.folder), "PATH": f"{programs}:{self.variables['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-euxc", places],
            env={**self.variables, **own},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr)
        return done.stdout

    def flip_bit(self) -> None:
        path = max((self.repository / "data").rglob("*"), key=lambda each: each.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)


def page(folder: Path, variables: Mapping[str, str]) -> Page:
    """Return the page's commands, or skip a test where restic is missing."""
    if shutil.which("restic") is None:
        pytest.skip("restic is not installed (apt-get install restic)")
    return Page(folder=folder, variables=variables)
