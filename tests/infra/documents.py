"""The files of infra/ as values, and the tools that check them where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).resolve().parents[2] / "infra"
SECRETS = (
    "POSTGRES_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD", "WEB_PASSWORD", "MLFLOW_SESSIONS_SECRET",
)  # fmt: skip


def read(path: str) -> Any:
    """A YAML file of one document."""
    return yaml.safe_load((INFRA / path).read_text(encoding="utf-8"))


def tool(name: str) -> str:
    """The path of a program, looked for beside the interpreter too; the test is skipped without it."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is no mapping or list, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, str(number)))
    else:
        yield path, value


def has_digest(image: str) -> bool:
    """True if an image is named by its digest."""
    return re.search(r"^\S+@sha256:[0-9a-f]{64}$", image) is not None
