"""The output of a run whose worker has died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAYS = """
import logging, sys
from pathlib import Path
from prefect.logging.configuration import setup_logging
setup_logging()
for number in range(3):
    logging.getLogger("run").critical("line %d", number)
print("printed", flush=True)
print("printed", file=sys.stderr, flush=True)
Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize(("handler", "lives"), [("WorkerOutput", True), ("PrefectConsoleHandler", False)])
def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path: Path, handler: str, *, lives: bool) -> None:
    module = "rlcore.tasks.run.worker_output"
    variables = os.environ | {"PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": f"{module}.{handler}"}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", SAYS, str(tmp_path / "end")]
    status = subprocess.run(command, env=variables, stdout=write, stderr=write, check=False).returncode
    os.close(write)
    assert (status == 0, (tmp_path / "end").exists()) == (lives, lives)
