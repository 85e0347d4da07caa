"""The filter, run by a small reading of BPF: the kernel is asked in the attacks."""

from __future__ import annotations

import errno
import struct

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.seccomp import allow_list

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
THREAD = 0x3D0F00  # what libc's pthread_create asks for
# read, openat, execve, futex; then socket, fork-like clone, memfd_create, ptrace, mount, unshare, bpf, io_uring_setup
CALLS = {
    "x86_64": ((0, 257, 59, 202), (41, 57, 58, 319, 101, 165, 272, 321, 425)),
    "aarch64": ((63, 56, 221, 98), (198, 279, 117, 40, 97, 280, 425)),
}


def run(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Interpret the classic BPF instructions of the filter as the kernel does."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x06:
                return int(operand)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_python_needs_is_allowed_and_the_rest_fails(machine: str) -> None:
    program, architecture = allow_list(machine), ARCHITECTURES[machine]
    allowed, refused = CALLS[machine]
    assert {run(program, architecture, number) for number in allowed} == {ALLOW}
    assert {run(program, architecture, number) for number in refused} == {ERRNO | errno.EPERM}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_clone_makes_threads_alone(machine: str) -> None:
    program, architecture = allow_list(machine), ARCHITECTURES[machine]
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    assert run(program, architecture, clone, THREAD) == ALLOW
    for flags in (17, 0x11, THREAD | 0x10000000, THREAD & ~0x10000, 0x4000 | 0x100):
        assert run(program, architecture, clone, flags) == ERRNO | errno.EPERM
    assert run(program, architecture, 435, THREAD) == ERRNO | errno.ENOSYS  # clone3


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_five_ioctls_are_allowed(machine: str) -> None:
    program, architecture = allow_list(machine), ARCHITECTURES[machine]
    ioctl = {"x86_64": 16, "aarch64": 29}[machine]
    found = [request for request in range(0x5400, 0x5460) if run(program, architecture, ioctl, 0, request) == ALLOW]
    assert found == [0x5401, 0x5413, 0x5421, 0x5450, 0x5451]


def test_another_architecture_and_the_other_abi_are_killed() -> None:
    program = allow_list("x86_64")
    assert run(program, 0x40000003, 0) == KILL  # 32 bits
    assert run(program, ARCHITECTURES["x86_64"], 0x40000000) == KILL  # x32


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        allow_list("riscv64")
