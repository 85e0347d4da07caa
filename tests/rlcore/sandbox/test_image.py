"""Isolation of a program: the image, the system calls that are allowed, and the self-test."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.image import box_image
from rlcore.sandbox.isolation import allow_list
from rlcore.sandbox.pool import Job, self_test


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache without an image: other tests run in the usual one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlcore-boxes"


def test_an_image_is_used_again_while_it_is_whole_then_made_anew_beside_it(cache: Path) -> None:
    first = box_image()
    made = first.stat().st_ctime_ns
    assert cache.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)  # for this user alone
    assert (box_image(), first.stat().st_ctime_ns, first.parent) == (first, made, cache)
    assert {path.name for path in cache.iterdir()} == {
        "lock",
        first.name,
        *(path.name for path in cache.glob("*.json")),
    }
    next((first / "root").rglob("this.py")).unlink()
    (cache / ".new-killed").mkdir()  # what a process that was killed has left
    (cache / ".new-killed.json").touch()
    (first / "root" / "mark").touch()  # the old folder is still the one that boxes have mounted
    second = box_image()
    assert second != first
    assert list((second / "root").rglob("this.py"))
    assert (first / "root" / "mark").exists()
    assert second.name.rpartition("-")[0] == first.name.rpartition("-")[0]  # named by the same content
    assert box_image() == second
    assert list(cache.glob(".new-*")) == []


MANY = """
import sys
from rlcore.sandbox.image import box_image
sys.stdin.readline()
print(box_image())
"""


def test_of_many_processes_that_start_at_once_one_makes_the_image(cache: Path) -> None:
    pipe = subprocess.PIPE
    starting = [subprocess.Popen([sys.executable, "-c", MANY], stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in starting:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {process.communicate()[0].strip() for process in starting}
    assert [process.returncode for process in starting] == [0] * 4
    assert found == {str(box_image())}
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_an_image_has_no_shell_no_package_and_no_configuration() -> None:
    root = box_image() / "root"
    names = {path.name for path in root.rglob("*")}
    assert names.isdisjoint({"sh", "bash", "etc", "proc", "site-packages", "passwd", "test", "idlelib"})
    assert {path.name for path in root.iterdir()} <= {"python", "lib", "lib64", "dev"}


def test_every_user_may_read_an_image_and_nobody_else_may_write() -> None:
    for path in (box_image() / "root").rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o022 == 0
            assert path.stat().st_mode & 0o004


def test_a_folder_that_others_may_write_to_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(SandboxError, match=r"(?s)other users may write.*XDG_CACHE_HOME"):
        box_image()


def test_a_link_in_place_of_the_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="belongs to another user"):
        box_image()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SandboxError, match=r"(?s)cannot be written.*XDG_CACHE_HOME"):
        box_image()


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


PASSED, FAILED = RunResult(status=RunStatus.PASS), RunResult(status=RunStatus.FAIL)


class Scripted:
    """A sandbox that says what it is told to."""

    def __init__(
        self, succeeded: Sequence[str] = (), *, control: int = 42, loop: RunStatus = RunStatus.TIMEOUT
    ) -> None:
        self.report = RunResult(
            status=RunStatus.PASS, stdout=json.dumps({"control": control, "succeeded": list(succeeded)})
        )
        self.loop = RunResult(status=loop)
        self.fooled_by = ""
        self.is_lame = False

    def run(self, code: str, limits: ResourceLimits) -> RunResult:
        return self.loop if code.startswith("while") else self.report

    def check(self, job: Job) -> list[RunResult]:
        passes = (job.code == "def double(x): return 2 * x" and not self.is_lame) or (
            bool(self.fooled_by) and self.fooled_by in job.code
        )
        return [PASSED if passes else FAILED] * 2


def test_a_sandbox_without_holes_passes() -> None:
    box = Scripted()
    self_test(box.run, box.check)


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (Scripted(["fork", "network"]), "could fork, network"),
        (Scripted(control=0), "is not isolated"),
        (Scripted(loop=RunStatus.PASS), "endless loop was not stopped"),
    ],
)
def test_a_hole_is_named(box: Scripted, what: str) -> None:
    with pytest.raises(SandboxError, match=what):
        self_test(box.run, box.check)


@pytest.mark.parametrize("fragment", ["os._exit", "__eq__", "os.write", "return 42"])
def test_a_sandbox_that_can_be_fooled_is_refused(fragment: str) -> None:
    box = Scripted()
    box.fooled_by = fragment
    with pytest.raises(SandboxError, match="passed the tests"):
        self_test(box.run, box.check)


def test_a_sandbox_in_which_nothing_passes_proves_nothing() -> None:
    box = Scripted()
    box.is_lame = True
    with pytest.raises(SandboxError, match="a correct program failed"):
        self_test(box.run, box.check)
    box.report = RunResult(status=RunStatus.INFRA, error="no namespaces")
    with pytest.raises(SandboxError, match=r"(?s)no namespaces.*fix:"):
        self_test(box.run, box.check)
