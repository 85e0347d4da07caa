"""The process of a server: its start, its guard, and the GPUs that it gets."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import EngineConfig, GpuConfig
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.vllm import guard as guard_script
from rlcore.sampling.vllm.client import Address, address_of
from rlcore.sampling.vllm.gpu_assignment import (
    VisibleGpus,
    assign_gpus,
    memory_fractions,
    shares_trainer_gpu,
    visible_gpus,
)
from rlcore.sampling.vllm.process import ServerProcess, command, environment
from tests.rlcore.sampling.servers import interpreter, server_spec
from tests.waiting import LONG, until, until_ended


def test_an_engine_that_ends_at_its_start_is_an_error_with_its_last_lines(checkpoint: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo no module named vllm >&2", "exit 3")
    process = ServerProcess(server_spec(checkpoint, tmp_path, engine={"python": python}))
    with pytest.raises(SamplingError, match="ended as it started; its last lines:\n    no module named vllm"):
        process.wait_until_ready(lambda line: None)
    assert not process.folder.exists()


def test_the_first_error_of_a_long_log_is_shown_with_its_last_lines(checkpoint: Path, tmp_path: Path) -> None:
    says = [
        "INFO starts",
        "(Worker) ERROR 11-21 RuntimeError: the cause",
        *(f"(API) ERROR ValueError: {n}" for n in range(30)),
    ]
    python = interpreter(tmp_path, *(f"echo '{line}'" for line in says))
    process = ServerProcess(server_spec(checkpoint, tmp_path, engine={"python": python}))
    process._guard.wait(LONG)
    lines = [line.strip() for line in process.log_tail().splitlines()]
    process.stop()
    assert lines == [says[1], *says[-15:]]


def test_an_interpreter_or_an_address_that_cannot_be_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match=r"the interpreter .* does not exist"):
        ServerProcess(server_spec(checkpoint, tmp_path, engine={"python": str(tmp_path / "none")}))
    with pytest.raises(ConfigError, match="not http://host:port"):
        address_of("localhost:80")


def test_a_server_gets_its_gpus_and_its_part_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = server_spec(tmp_path, tmp_path, engine={"gpus": GpuConfig(tensor_parallel=2)}, dtype="float16")
    on_cpu = command(spec, "python", Address("127.0.0.1", 1, "planted-token"))
    assert on_cpu[on_cpu.index("--middleware") + 1] == "rlcore_worker.gate.Gate"
    assert "planted-token" not in " ".join(on_cpu) + repr(Address("127.0.0.1", 1, "planted-token"))
    assert "--enforce-eager" in on_cpu
    assert "CUDA_VISIBLE_DEVICES" not in environment(spec, tmp_path)
    spec = dataclasses.replace(spec, devices=(2, 0), gpu_memory_utilization=0.4, enforce_eager=False)
    line = command(spec, "python", Address("127.0.0.1", 1))
    assert line[line.index("--tensor-parallel-size") + 1] == "2"
    assert line[line.index("--gpu-memory-utilization") + 1] == "0.4"
    assert line[line.index("--dtype") + 1] == "float16"
    assert "--enforce-eager" not in line
    assert environment(spec, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8f,3")  # ours are counted among these
    assert environment(spec, tmp_path)["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_what_a_servers_processes_leave_lies_in_its_folder_and_sockets_where_their_names_fit(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    python = interpreter(tmp_path, 'touch "$(mktemp -u -t vllm_dist_XXXXXX)"', "exec sleep 600")
    spec = server_spec(checkpoint, tmp_path, engine={"python": python})
    before = set(Path(tempfile.gettempdir()).glob("vllm_dist_*"))
    process = ServerProcess(spec)
    until(lambda: list(process.folder.glob("vllm_dist_*")), "its file")
    for child in psutil.Process(process._guard.pid).children(recursive=True):
        child.kill()
    process.stop()
    assert not process.folder.exists()
    assert set(Path(tempfile.gettempdir()).glob("vllm_dist_*")) <= before
    assert "VLLM_RPC_BASE_PATH" not in environment(spec, Path("/tmp/short"))
    assert Path(environment(spec, tmp_path)["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(tempfile.gettempdir())
    assert environment(spec, Path("/tmp", 70 * "x"))["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir()


# An "engine" with a child that has left the process group, as a daemon does; both write their numbers and wait.
ENGINE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""

# A parent that starts the guard and waits.
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-I", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
time.sleep(600)
"""


def guarded(folder: Path, numbers: Path) -> list[str]:
    return [str(folder), sys.executable, "-c", ENGINE, str(numbers)]


def processes_of(numbers: Path) -> list[int]:
    until(numbers.exists, "the engine")
    return [int(number) for number in numbers.read_text().split()]


def start_guard(folder: Path, numbers: Path) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", guard_script.__file__, str(os.getpid())]
    return subprocess.Popen([*guard, *guarded(folder, numbers)])


@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_and_its_folders_go_with_a_parent_that_is_killed(tmp_path: Path, last: signal.Signals) -> None:
    folder, numbers = tmp_path / "weights", tmp_path / "numbers"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, guard_script.__file__, *guarded(folder, numbers)])
    processes = processes_of(numbers)
    parent.send_signal(last)
    parent.wait()
    until_ended(processes)
    until(lambda: not folder.exists(), "the end of the weight files")


def test_the_engine_goes_when_the_guard_is_asked_and_the_folder_stays_for_the_parent(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "log", tmp_path / "numbers"
    folder.mkdir()
    guard = start_guard(folder, numbers)
    processes = processes_of(numbers)
    guard.terminate()
    assert guard.wait(LONG) == 143
    until_ended(processes)
    assert folder.exists()


def test_memory_that_a_killed_engine_shared_is_freed(tmp_path: Path) -> None:
    """Two processes map it, the first is killed; Python's own tracker of such memory is told to forget it."""
    engine = """
import subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(name=sys.argv[2] if len(sys.argv) > 2 else None, create=len(sys.argv) < 3, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], memory.name])
else:
    print(memory.name, flush=True)
time.sleep(600)
"""
    guard = [sys.executable, "-I", guard_script.__file__, str(os.getpid()), str(tmp_path)]
    with subprocess.Popen([*guard, sys.executable, "-c", engine, engine], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        path = Path("/dev/shm", running.stdout.readline().strip())
        assert path.name.startswith("psm_")
        assert path.exists()
        (first,) = psutil.Process(running.pid).children()
        first.kill()
        running.wait(LONG)
    assert not path.exists()


def test_what_an_engine_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    guard = start_guard(tmp_path, tmp_path / "numbers")
    engine, child = processes_of(tmp_path / "numbers")
    os.kill(engine, signal.SIGKILL)
    assert guard.wait(LONG) == -signal.SIGKILL % 256
    until_ended([child])


def vllm(**settings: Any) -> EngineConfig:
    """Interpreter, replicas and URLs are the engine's; all else is of its GPUs."""
    own = {name: settings.pop(name) for name in ("python", "replicas", "urls") if name in settings}
    return EngineConfig(kind="vllm", gpus=GpuConfig(**settings), **own)


def cards(count: int, trainer: int | None = 0, **settings: Any) -> VisibleGpus:
    return VisibleGpus(count=count, trainer=trainer, **settings)


@pytest.mark.parametrize(
    ("settings", "seen", "expected"),
    [
        ({"replicas": 7}, cards(8), [(n,) for n in range(1, 8)]),
        ({"replicas": 2}, cards(4, trainer=1), [(0,), (2,)]),
        ({"replicas": 3, "tensor_parallel": 2}, cards(8), [(1, 2), (3, 4), (5, 6)]),
        ({"replicas": 2, "tensor_parallel": 2, "devices": (7, 6, 3, 1)}, cards(8), [(7, 6), (3, 1)]),
        ({"replicas": 2, "devices": (1, 1)}, cards(2), [(1,), (1,)]),
        ({}, cards(1), [(0,)]),  # the only one is shared with the trainer
        ({"replicas": 2}, cards(1), [(0,), (0,)]),
        ({"replicas": 2}, cards(2, trainer=None), [(0,), (1,)]),  # it trains on the processor
        ({"replicas": 2, "tensor_parallel": 2}, cards(0, trainer=None), [(), ()]),
    ],
)
def test_gpus_are_dealt_in_order_beside_the_trainers_or_as_named(
    settings: dict[str, Any], seen: VisibleGpus, expected: list[tuple[int, ...]]
) -> None:
    assert assign_gpus(vllm(**settings), seen) == expected


@pytest.mark.parametrize(
    ("settings", "seen", "message"),
    [
        ({"replicas": 8}, cards(8), "8 replicas of 1 GPUs need 8, 7 are visible besides the trainer's"),
        ({"tensor_parallel": 2}, cards(1), "1 replicas of 2 GPUs need 2, 0 are visible besides the trainer's"),
        ({"tensor_parallel": 2}, cards(1, trainer=None), r"need 2, 1 are visible\n"),
        ({"devices": (2,)}, cards(2), "devices names GPU 2, the visible ones are 0 to 1"),
        ({"devices": (0,)}, cards(0, trainer=None), "devices names GPUs, but none is visible"),
        ({"devices": (1, 1), "tensor_parallel": 2}, cards(2), "has GPU 1 twice"),
    ],
)
def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    settings: dict[str, Any], seen: VisibleGpus, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_gpus(vllm(**settings), seen)


@given(replicas=st.integers(1, 9), width=st.integers(1, 4), count=st.integers(1, 16), trainer=st.integers(0, 15))
def test_no_gpu_is_dealt_twice_and_none_is_the_trainers_where_there_are_several(
    replicas: int, width: int, count: int, trainer: int
) -> None:
    seen = cards(count, trainer=trainer % count)
    try:
        dealt = assign_gpus(vllm(replicas=replicas, tensor_parallel=width), seen)
    except ConfigError:
        assert replicas * width > count - 1 and (count > 1 or width > 1)
        return
    if count > 1:
        flat = [index for each in dealt for index in each]
        assert len(set(flat)) == len(flat) == replicas * width
        assert seen.trainer not in flat
        assert memory_fractions(vllm(), dealt, seen) == [0.85] * replicas
    assert {len(each) for each in dealt} == {width}


@pytest.mark.parametrize(
    ("dealt", "seen", "expected"),
    [
        ([(1,), (2,)], cards(3), [0.85, 0.85]),
        ([(1,), (1,)], cards(2), [0.425, 0.425]),
        ([(0,)], cards(1, learns=True), [0.4]),
        ([(0,), (0,)], cards(1, learns=True), [0.2, 0.2]),
        ([(0,)], cards(1, learns=True, free=0.2), [0.17]),  # a large model is on it
        ([(0,)], cards(1, free=0.8), [0.68]),  # nothing learns: what is free
        ([(0, 1)], cards(2, learns=True), [0.4]),  # the smaller share of the two
        ([()], cards(0, trainer=None), [0.85]),
    ],
)
def test_memory_is_shared_by_who_is_on_a_gpu_and_beside_a_learner_it_is_less(
    dealt: list[tuple[int, ...]], seen: VisibleGpus, expected: list[float]
) -> None:
    assert memory_fractions(vllm(), dealt, seen) == pytest.approx(expected)


def test_fractions_that_add_up_to_more_than_there_is_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 replicas want 1\.20 of GPU 1, of which 1\.00 is free"):
        memory_fractions(vllm(gpu_memory_utilization=0.6), [(1,), (1,)], cards(2))
    with pytest.raises(ConfigError, match=r"1 replicas want 0\.90 of the trainer's GPU, of which 0\.70 is free"):
        memory_fractions(vllm(gpu_memory_utilization=0.9), [(0,)], cards(1, free=0.7))
    assert memory_fractions(vllm(gpu_memory_utilization=0.5), [(1,), (1,)], cards(2)) == [0.5, 0.5]


def test_who_shares_the_trainers_gpu_is_known() -> None:
    assert shares_trainer_gpu([(0, 1), (2, 3)], cards(4)) == [True, False]
    assert shares_trainer_gpu([()], visible_gpus(torch.device("cpu"), learns=True)) == [False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": (0, 1)}, "devices has 2 GPUs, 1 replicas of 1 need 1"),
        ({"devices": (0,), "replicas": 2}, "devices has 1 GPUs, 2 replicas of 1 need 2"),
        ({"devices": (0,), "urls": ("http://a:1",)}, "set one or the other"),
        ({"tensor_parallel": 2, "urls": ("http://a:1",)}, "set one or the other"),
        ({"urls": ("http://a:1",), "python": "python"}, "set one or the other"),
        ({"urls": ("http://a:1",), "replicas": 2}, "set one or the other"),
        ({"urls": ("http://a:1", "http://a:1")}, "twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm(**settings)
