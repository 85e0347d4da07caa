"""State directories that several tests begin with: made once, and copied for each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.tracking.database import rewrite_artifact_paths


@contextmanager
def new_home(folder: Path, database: Path) -> Iterator[Home]:
    """A state directory with MLflow's tables, that the environment names inside the block."""
    home = Home(folder / "home")
    with pytest.MonkeyPatch.context() as variables:
        variables.delenv("MLFLOW_TRACKING_URI", raising=False)
        variables.setenv("RLCORE_ENGINE", "inline")
        variables.setenv("RLCORE_HOME", str(home.root))
        configure_environment(home)
        shutil.copyfile(database, home.root / "mlflow.db")
        yield home


def copy_home(made: Home, home: Home) -> None:
    """Let ``home`` be a copy, with its hard links and times."""
    shutil.rmtree(home.root)
    subprocess.run(["cp", "-a", str(made.root), str(home.root)], check=True)
    rewrite_artifact_paths(home)
