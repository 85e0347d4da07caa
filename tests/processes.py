"""Processes of a test that say where they are."""

from __future__ import annotations

import subprocess


def wait_for_line(process: subprocess.Popen[str], words: str) -> str:
    """The first line that holds these words; all that was said before it, where the process ends without one."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        if words in line:
            return line.strip()
        seen.append(line)
    raise AssertionError(f"the process ended before it said {words!r}:\n{''.join(seen)}")
