"""Attacks on the sandbox, run before the first program: a sandbox with incomplete isolation is never used.

A control confirms that the box runs programs: in a broken box every attack would fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlcore.errors import SandboxError
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus

Run = Callable[[str, ResourceLimits], RunResult]
Check = Callable[[str, str, ResourceLimits], Sequence[RunResult]]

_ATTACKS = r"""
import ctypes, json, os, signal, socket

libc = ctypes.CDLL(None, use_errno=True)

def fork():
    if os.fork() == 0:
        os._exit(0)

def network():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)

def unix_socket():
    socket.socketpair()

def write_a_file():
    for folder in ("/", "/tmp", "/dev", "/dev/shm", "/python", "/lib", "/var/tmp", "/run"):
        try:
            open(folder + "/x", "w")
        except OSError:
            continue
        return
    raise OSError

def read_the_host():
    for path in ("/etc/passwd", "/proc/self/status", "/proc/1/environ", "/home", "/root", "/sys", "/bin/sh"):
        if os.path.exists(path):
            return
    raise OSError

def see_other_processes():
    if os.getppid() > 1:
        return
    raise OSError

def inherit_a_secret():
    if set(os.environ) <= {"LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}:
        raise OSError

def inherit_a_descriptor():
    for number in range(3, 30):
        try:
            os.fstat(number)
        except OSError:
            continue
        return
    raise OSError

def take_memory():
    bytearray(1 << 30)

def be_root():
    if os.getuid() not in (0,):
        os.setuid(0)

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno())

def memory_file():
    os.memfd_create("x")

def new_namespace():
    if libc.unshare(0x10000000) < 0:
        raise OSError

def mount():
    if libc.mount(b"none", b"/", b"tmpfs", 0, None) < 0:
        raise OSError

def trace():
    if libc.ptrace(0, 0, None, None) < 0:
        raise OSError

succeeded = []
for attack in (fork, network, unix_socket, write_a_file, read_the_host, see_other_processes, inherit_a_secret,
               inherit_a_descriptor, take_memory, be_root, memory_file, new_namespace, mount, trace):
    try:
        attack()
    except (OSError, MemoryError):
        continue
    succeeded.append(attack.__name__)
print(json.dumps({"control": 6 * 7, "succeeded": succeeded}))
"""
_REFERENCE = json.dumps(
    {"style": "assert", "entry_point": "double", "tests": ["assert double(21) == 42", "assert double(0) == 0"]}
)
_FORGERIES = {
    "an exit at import": "import os; os._exit(0)",
    "an object that equals everything": "class Any:\n def __eq__(self, _): return True\ndef double(x): return Any()",
    "a forged verdict": "import os\nos.write(31, b'\\0\\0\\0\\x17u4:s7:verdicts1:xs4:passs0:')\ndouble = abs",
    "a wrong answer": "def double(x): return 42",
}
_LIMITS = ResourceLimits(wall_seconds=10.0)
FIX = (
    "allow unprivileged user namespaces (Debian: sysctl kernel.unprivileged_userns_clone=1; Ubuntu 24.04: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: a seccomp profile that allows unshare and mount)"
)


def self_test(run: Run, check: Check) -> None:
    """Run the attacks through a sandbox's functions.

    Raises:
        SandboxError: Boxes do not start, or their isolation is incomplete. No other program was run.
    """
    outcome = run(_ATTACKS, _LIMITS)
    if outcome.status is not RunStatus.PASS:
        raise SandboxError(f"the sandbox does not work on this machine: {outcome.status}: {outcome.error}", fix=FIX)
    report = json.loads(outcome.stdout)
    if report["control"] != 42 or report["succeeded"]:
        raise SandboxError(f"the sandbox is not isolated: a program could {', '.join(report['succeeded'])}", fix=FIX)
    if run("while True: pass", ResourceLimits(wall_seconds=0.3)).status is not RunStatus.TIMEOUT:
        raise SandboxError("the sandbox is not isolated: an endless loop was not stopped")
    right = check(_REFERENCE, "def double(x): return 2 * x", _LIMITS)
    if any(one.status is not RunStatus.PASS for one in right):
        raise SandboxError(
            f"the sandbox does not work on this machine: a correct program failed: {right[0].error}", fix=FIX
        )
    for name, code in _FORGERIES.items():
        if all(one.status is RunStatus.PASS for one in check(_REFERENCE, code, _LIMITS)):
            raise SandboxError(f"the sandbox is not isolated: {name} passed the tests")
