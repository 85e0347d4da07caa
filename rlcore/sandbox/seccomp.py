"""System calls that a box may make, as a BPF program that the kernel runs on each call (seccomp(2)).

It is an allow-list: other calls fail with EPERM. Deliberately absent are fork and vfork, sockets, memfd and shared
memory, ptrace, bpf, io_uring, mounts, namespaces, keys, and signals to others except by kill and tgkill (which reach no
process outside the box). Without fork, RLIMIT_AS bounds the one process of a box.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from rlcore.errors import SandboxError

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


@dataclass(frozen=True, slots=True)
class _Machine:
    column: int
    audit_architecture: int


_MACHINES = {"x86_64": _Machine(0, 0xC000003E), "aarch64": _Machine(1, 0xC00000B7)}


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
    kind = _MACHINES[name]
    numbers = [pair[kind.column] for pair in _CALLS.values()]
    program = [
        _load(_ARCHITECTURE),
        _unless_equal(kind.audit_architecture),
        _return(_KILL),
        _load(_NUMBER),
        _instruction(_JUMP_AT_LEAST, 0, 1, _X32),
        _return(_KILL),
    ]
    program += [step for number in numbers if number is not None for step in (_if_equal(number), _return(_ALLOW))]
    program += [_if_equal(_CLONE3[kind.column]), _return(_ERRNO | errno.ENOSYS)]  # libc falls back to clone
    program += _only_for(_CLONE[kind.column], _FIRST_ARGUMENT, [_THREAD], mask=_THREAD | _NAMESPACES)
    program += _only_for(_IOCTL[kind.column], _SECOND_ARGUMENT, _IOCTLS, mask=0xFFFFFFFF)
    return b"".join([*program, _return(_ERRNO | errno.EPERM)])


def _only_for(number: int, argument: int, values: tuple[int, ...] | list[int], *, mask: int) -> list[bytes]:
    """Allow a call if the low word of an argument, under ``mask``, is one of ``values``."""
    checks = [step for value in values for step in (_if_equal(value), _return(_ALLOW))]
    body = [_load(argument), _instruction(_AND, 0, 0, mask), *checks, _return(_ERRNO | errno.EPERM)]
    return [_instruction(_JUMP_EQUAL, 0, len(body), number), *body]


def _if_equal(value: int) -> bytes:
    """Continue if equal, else skip one instruction."""
    return _instruction(_JUMP_EQUAL, 0, 1, value)


def _unless_equal(value: int) -> bytes:
    """Skip one instruction if equal."""
    return _instruction(_JUMP_EQUAL, 1, 0, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, 0, 0, offset)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, 0, 0, action)


def _instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    """Return one ``struct sock_filter``."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)
