"""Agents of a run: errors that can be found before it, and the files that their results depend on."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from rlcore.agents.program import files_below, open_program
from rlcore.config import AgentConfig
from rlcore.tasks.presets.run import collect_error
from rlcore.tasks.steps.files import file_digest


def agent_errors(agent: AgentConfig, path: str) -> Iterator[str]:
    """Yield the errors in the agent of a section, each with its full key; ``path``: the section's."""
    for key, files in (("files", agent.files), ("sandbox_read", agent.sandbox_read)):
        for number, file in enumerate(files):
            if not Path(file).exists():
                yield f"{path}.{key}.{number} = {file!r}: no such file"
    yield from _command_errors(agent, path)
    if sys.platform != "linux":
        yield f"{path}: processes of agents are ended by means of Linux; run it on Linux"
        return
    with ExitStack() as stack:
        yield from collect_error(f"{path}.sandbox", lambda: stack.enter_context(open_program(agent)))


def agent_digests(agent: AgentConfig | None) -> list[tuple[str, str]]:
    """Return names and digests of the files that an agent consists of.

    Raises:
        DataError: a file cannot be read.
    """
    if agent is None:
        return []
    named = [word for word in agent.command if Path(word).is_absolute() and Path(word).is_file()]
    return [pair for file in (*agent.files, *named) for pair in _digests(Path(file))]


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests of a file, or of all files and links of a folder."""
    for each in files_below(path):
        is_link = each.is_symlink() and each != path
        name = str(Path(path.name, each.relative_to(path)))
        yield name, f"link to {each.readlink()}" if is_link else file_digest(str(each))[1]


def _command_errors(agent: AgentConfig, path: str) -> Iterator[str]:
    """Check that the command exists where agents run: on PATH, or in the working folder that has the files."""
    program, copied = agent.command[0], {Path(file).name: Path(file) for file in agent.files}
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    is_relative = "/" in program and not Path(program).is_absolute()
    inside = _source(program, copied) if is_relative else None
    if inside and not os.access(inside, os.X_OK):
        yield f"{path}.command = {program!r}: {inside} is not executable; chmod +x, or name its interpreter first"
    elif not inside and (is_relative or shutil.which(program, path=agent.env.get("PATH", search)) is None):
        yield (
            f"{path}.command = {program!r}: no such program; install it, or add its file to files and write "
            f"./{Path(program).name}"
        )
    for word in (each for each in agent.command if not Path(each).is_absolute()):
        name = Path(word).name
        is_path = re.fullmatch(r"[\w.][\w./-]*", word)  # no command of a shell, and no option
        if is_path and name in copied and _source(word, copied) is None:
            yield f"{path}.command: {word!r} is copied to the agent's own folder without folders; write {name}"
        elif _source(word, copied) is None and word != program and Path(word).is_file():
            yield f"{path}.command: {word!r} is a file here, and agents run in a folder of their own; add it to files"


def _source(word: str, copied: Mapping[str, Path]) -> Path | None:
    """Return the file that a word of the command names in the working folder."""
    first, *rest = Path(word).parts or ("",)
    return Path(copied[first], *rest) if first in copied else None
