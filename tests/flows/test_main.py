"""The command where the library alone is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlcore.extras import describe_installation, install_command

WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from rlcore.flows.__main__ import main
sys.exit(main())
"""


def command(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``rlcore`` with one package missing."""
    line = [sys.executable, "-c", WITHOUT, missing, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("missing", "arguments"), [("cyclopts", ()), ("pandera", ("validate", "tiny"))])
def test_a_missing_package_of_the_pipeline_is_one_line_with_the_command_that_installs_it(
    missing: str, arguments: tuple[str, ...]
) -> None:
    done = command(missing, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f" lacks {missing} of the extra pipeline: {install_command('pipeline')}" in line


def test_the_version_is_there_without_the_pipeline() -> None:
    assert command("cyclopts", "--version").stdout == f"{describe_installation()}\n"


def test_another_missing_package_is_no_matter_of_the_pipeline() -> None:
    assert "ModuleNotFoundError" in command("rlcore.flows.cli.app").stderr
