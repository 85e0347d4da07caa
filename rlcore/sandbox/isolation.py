"""Process of a box and its isolation: the arguments of bubblewrap and the code that runs inside."""

from __future__ import annotations

import ast
import functools
import marshal
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from rlcore.sandbox import runner, script, seccomp, wire
from rlcore.sandbox.image import PYTHON

_BOOTSTRAP = """
import posix, marshal, sys
parts, left = [], int(sys.argv[1])
while left:
    parts.append(posix.read(0, left))
    left -= len(parts[-1]) or posix._exit(0)
exec(marshal.loads(b"".join(parts)))
main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""
# No --dev (its /dev/shm is writable), /proc, /tmp or writable folder: the image is the whole file system.
_ISOLATION = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
    "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
    "--clearenv", "--setenv", "LD_LIBRARY_PATH", "/lib", "--hostname", "box",
)  # fmt: skip
_FILES = (
    "--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom", "--remount-ro", "/",
    "--chdir", "/",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """Process isolation of boxes: the path of ``bwrap`` and of the image. Both are empty for no isolation."""

    bwrap: str = ""
    image: str = ""


def spawn(isolation: Isolation, arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process of a box. Also return the pipe on which bwrap writes its pid (-1 without bwrap)."""
    if not isolation.bwrap:
        return _popen([_plain_python(), *_python_arguments(arguments)], ()), -1
    filter_end, (info, info_end) = _filter_pipe(), os.pipe()
    command = [isolation.bwrap, *_ISOLATION, "--ro-bind", isolation.image, "/", *_FILES]
    command += ["--seccomp", str(filter_end), "--info-fd", str(info_end), "--", PYTHON, *_python_arguments(arguments)]
    try:
        return _popen(command, (filter_end, info_end)), info
    except OSError:
        os.close(info)
        raise
    finally:
        os.close(filter_end)
        os.close(info_end)


def _popen(command: list[str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, pass_fds=descriptors, cwd="/", env={}
    )


def _python_arguments(arguments: list[str]) -> list[str]:
    return ["-I", "-S", "-B", "-X", "utf8", "-c", _BOOTSTRAP, *arguments]


def _plain_python() -> str:
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _filter_pipe() -> int:
    """Return a new pipe with the filter. Boxes that share a file would share its offset."""
    read_end, write_end = os.pipe()
    os.write(write_end, _filter())
    os.close(write_end)
    return read_end


@functools.cache
def _filter() -> bytes:
    return seccomp.allow_list()


@functools.cache
def runner_code() -> bytes:
    """Return ``wire``, ``script`` and ``runner`` as one code object, without imports for type checkers.

    The supervisor calls it once, while it may still read these files; the result is cached.
    """
    body: list[ast.stmt] = []
    for module in (wire, script, runner):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        body += [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    whole = ast.Module(body=body, type_ignores=[])
    flags = annotations.compiler_flag
    code: CodeType = compile(whole, "<runner>", "exec", flags=flags, dont_inherit=True, optimize=2)
    return marshal.dumps(code)
