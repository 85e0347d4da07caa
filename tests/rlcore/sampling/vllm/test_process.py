"""The process of a vLLM server: its command, environment, files and last words."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import psutil
import pytest

from rlcore.config import EngineConfig, GpuConfig, TimeoutConfig
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.vllm.client import Address, address_of
from rlcore.sampling.vllm.process import ServerProcess, ServerSpec, command, environment
from tests.waiting import LONG, until


def test_an_engine_that_ends_as_it_starts_says_its_last_lines(checkpoint: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    spec = ServerSpec(
        model=checkpoint,
        weight_dir=tmp_path,
        config=EngineConfig(kind="vllm", python=str(python)),
        dtype="float32",
        max_model_len=128,
        max_concurrent=1,
    )
    process = ServerProcess(spec)
    with pytest.raises(SamplingError, match="ended as it started; its last lines:\n    no module named vllm"):
        process.wait_until_ready(lambda line: None)
    assert not process.folder.exists()


def test_the_first_error_of_a_long_log_is_said_with_its_last_lines(checkpoint: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    says = [
        "INFO starts",
        "(Worker) ERROR 11-21 RuntimeError: the cause",
        *(f"(API) ERROR ValueError: {n}" for n in range(30)),
    ]
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in says), encoding="utf-8")
    python.chmod(0o755)
    config = EngineConfig(kind="vllm", python=str(python))
    process = ServerProcess(
        ServerSpec(
            model=checkpoint, weight_dir=tmp_path, config=config, dtype="float32", max_model_len=128, max_concurrent=1
        )
    )
    process._guard.wait(LONG)
    lines = [line.strip() for line in process.log_tail().splitlines()]
    process.stop()
    assert lines == [says[1], *says[-15:]]


def test_an_interpreter_or_an_address_that_cannot_be_is_named(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", python=str(tmp_path / "none"))
    spec = ServerSpec(
        model=checkpoint, weight_dir=tmp_path, config=config, dtype="float32", max_model_len=128, max_concurrent=1
    )
    with pytest.raises(SamplingError, match=r"the interpreter .* does not exist"):
        ServerProcess(spec)
    with pytest.raises(ConfigError, match="not http://host:port"):
        address_of("localhost:80")
    with pytest.raises(ConfigError, match="set one or the other"):
        EngineConfig(urls=("http://a:1",), python="python")
    with pytest.raises(ConfigError, match="set one or the other"):
        EngineConfig(urls=("http://a:1",), replicas=2)
    with pytest.raises(ConfigError, match="twice"):
        EngineConfig(urls=("http://a:1", "http://a:1"))


def test_a_server_gets_its_gpus_and_its_part_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig(kind="vllm", gpus=GpuConfig(tensor_parallel=2))
    spec = ServerSpec(
        model=tmp_path, weight_dir=tmp_path, config=config, dtype="float16", max_model_len=128, max_concurrent=1
    )
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
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntouch "$(mktemp -u -t vllm_dist_XXXXXX)"\nexec sleep 600\n', encoding="utf-8")
    python.chmod(0o755)
    config = EngineConfig(kind="vllm", python=str(python), timeouts=TimeoutConfig(startup_seconds=2.0))
    spec = ServerSpec(
        model=checkpoint, weight_dir=tmp_path, config=config, dtype="float32", max_model_len=128, max_concurrent=1
    )
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
