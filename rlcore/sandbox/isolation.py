"""Process of a box and its isolation: the arguments of bubblewrap, the system calls, and the code that runs inside.

System calls are an allow-list, a BPF program that the kernel runs on each call (seccomp(2)); others fail with EPERM.
Deliberately absent are fork and vfork, sockets, memfd and shared memory, ptrace, bpf, io_uring, mounts, namespaces,
keys, and signals to others except by kill and tgkill (which reach no process outside the box). Without fork, RLIMIT_AS
bounds the one process of a box.
"""

from __future__ import annotations

import ast
import errno
import functools
import marshal
import os
import platform
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from rlcore.errors import SandboxError
from rlcore.sandbox import runner, wire
from rlcore.sandbox.image import PYTHON, base_python

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
        return _popen([base_python(), *_python_arguments(arguments)], ()), -1
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


def _filter_pipe() -> int:
    """Return a new pipe with the filter. Boxes that share a file would share its offset."""
    read_end, write_end = os.pipe()
    os.write(write_end, allow_list())
    os.close(write_end)
    return read_end


@functools.cache
def runner_code() -> bytes:
    """Return ``wire`` and ``runner`` as one code object, without imports for type checkers.

    The supervisor calls it once, while it may still read these files; the result is cached.
    """
    body: list[ast.stmt] = []
    for module in (wire, runner):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        body += [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    whole = ast.Module(body=body, type_ignores=[])
    flags = annotations.compiler_flag
    code: CodeType = compile(whole, "<runner>", "exec", flags=flags, dont_inherit=True, optimize=2)
    return marshal.dumps(code)


_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_X32 = 0x40000000  # second ABI of x86_64, with other numbers for the same calls

_THREAD = 0x00010000 | 0x00000100 | 0x00000800  # CLONE_THREAD | CLONE_VM | CLONE_SIGHAND
_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONBIO, FIONCLEX, FIOCLEX

# Number on x86_64 (None: it has no such call), then on aarch64.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "open": (2, None), "openat": (257, 56),
    "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "lseek": (8, 62), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "fcntl": (72, 25), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "kill": (62, 129),
    "tgkill": (234, 131), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "execve": (59, 221), "exit": (60, 93),
    "exit_group": (231, 94), "wait4": (61, 260), "arch_prctl": (158, None), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "prlimit64": (302, 261), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "getrandom": (318, 278), "sysinfo": (99, 179), "uname": (63, 160),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "membarrier": (324, 283), "restart_syscall": (219, 128),
}  # fmt: skip
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)


_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and AUDIT_ARCH


@functools.cache
def allow_list(machine: str = "") -> bytes:
    """Return the compiled filter for ``machine`` (``x86_64`` or ``aarch64``; default: this machine).

    Raises:
        SandboxError: The machine is not supported.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxError(
            f"the sandbox has no list of system calls for {name}",
            fix=f"run untrusted code on one of {', '.join(_MACHINES)}",
        )
    column, architecture = _MACHINES[name]
    numbers = [pair[column] for pair in _CALLS.values()]
    program = [
        _load(_ARCHITECTURE),
        _unless_equal(architecture),
        _return(_KILL),
        _load(_NUMBER),
        _instruction(_JUMP_AT_LEAST, 0, 1, _X32),
        _return(_KILL),
    ]
    program += [step for number in numbers if number is not None for step in (_if_equal(number), _return(_ALLOW))]
    program += [_if_equal(_CLONE3[column]), _return(_ERRNO | errno.ENOSYS)]  # libc falls back to clone
    program += _only_for(_CLONE[column], _FIRST_ARGUMENT, [_THREAD], mask=_THREAD | _NAMESPACES)
    program += _only_for(_IOCTL[column], _SECOND_ARGUMENT, _IOCTLS, mask=0xFFFFFFFF)
    return b"".join([*program, _return(_ERRNO | errno.EPERM)])


def _only_for(number: int, argument: int, values: tuple[int, ...] | list[int], *, mask: int) -> list[bytes]:
    checks = [step for value in values for step in (_if_equal(value), _return(_ALLOW))]
    body = [_load(argument), _instruction(_AND, 0, 0, mask), *checks, _return(_ERRNO | errno.EPERM)]
    return [_instruction(_JUMP_EQUAL, 0, len(body), number), *body]


def _if_equal(value: int) -> bytes:
    return _instruction(_JUMP_EQUAL, 0, 1, value)


def _unless_equal(value: int) -> bytes:
    return _instruction(_JUMP_EQUAL, 1, 0, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, 0, 0, offset)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, 0, 0, action)


def _instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
