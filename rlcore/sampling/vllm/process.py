"""vLLM server as a child process: its command line, startup timeout, log and shutdown."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import SamplingError
from rlcore.extras import engine_command
from rlcore.sampling.vllm import guard
from rlcore.sampling.vllm.client import Address, EngineUnreachableError, call
from rlcore.sampling.vllm.worker.gate import TOKEN, Gate

ALONE = 0.85  # fraction of a GPU's memory, for a server without other users of it
WORKER_FOLDER = Path(__file__).with_name("worker")
WORKER_PACKAGE = "rlcore_worker"  # package name in the engine's environment
WORKER_CLASS = f"{WORKER_PACKAGE}.receiver.WeightReceiver"
BY_FILE: frozenset[TransferKind] = frozenset(("file", "shared_memory"))  # others use vLLM's weight-transfer API
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM supports; others use the next larger
_LOG_LINES = 15
_ERROR = re.compile(r" ERROR .*\w(Error|Exception): ")
_SOCKET_FOLDER = 70  # characters; a socket's path has 37 more, and the kernel limits its length
_HEALTH_SECONDS = 10.0
_STOP_SECONDS = guard.GRACE_SECONDS + 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """Model and settings of a server.

    Attributes:
        weight_dir: Folder of the weight files.
        dtype: Name of a torch type.
        url: Address of a running server; empty to start one.
        transfer: Never ``auto``.
        devices: Indices of visible GPUs; empty for a CPU.
        trainer_moves: The trainer's weights change while the server samples.
        sleeps: Release a GPU shared with a learner during updates. False on a CPU, where vLLM refuses to start with it.
        lora_rank: Rank of LoRA weights that are sent as such; 0 if merged.
        prefill_in_parts: Chunked prefill. With it and seeded requests, vLLM 0.32 crashes on a CPU.
        worker_file: File of ``worker_class``, which receives the weights, if it is not rlcore's.
    """

    model: Path
    weight_dir: Path
    config: EngineConfig
    dtype: str
    max_model_len: int
    max_concurrent: int
    url: str = ""
    transfer: TransferKind = "file"
    devices: tuple[int, ...] = ()
    gpu_memory_utilization: float = ALONE
    enforce_eager: bool = True
    trainer_moves: bool = False
    sleeps: bool = False
    lora_rank: int = 0
    prefill_in_parts: bool = False
    worker_file: Path | None = None
    worker_class: str = WORKER_CLASS


class ServerProcess:
    """Server process, stopped by :mod:`rlcore.sampling.vllm.guard` when this process ends.

    ``folder``, removed when it stops, has its log, the worker's module and temporary files.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Start the server.

        Raises:
            SamplingError: The interpreter does not exist.
        """
        self.spec = spec
        self.address = Address("127.0.0.1", _free_port(), secrets.token_urlsafe(24))
        self.folder = Path(tempfile.mkdtemp(prefix="rlcore-engine-"))
        self._log = self.folder / "engine.log"
        shutil.copytree(WORKER_FOLDER, self.folder / WORKER_PACKAGE)
        if spec.worker_file is not None:
            shutil.copy(spec.worker_file, self.folder)
        watched = [
            sys.executable,
            "-I",
            guard.__file__,
            str(os.getpid()),
            f"{self.folder}{os.pathsep}{spec.weight_dir}",
        ]
        python = spec.config.python or sys.executable
        if shutil.which(python) is None:
            shutil.rmtree(self.folder)
            raise SamplingError(
                f"the interpreter {python} does not exist",
                where="engine.python",
                fix=f"name an environment with vLLM, such as .venv-engine/bin/python: {engine_command()}",
            )
        with self._log.open("wb") as log:
            self._guard = subprocess.Popen(
                [*watched, *command(spec, python, self.address)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment(spec, self.folder), TOKEN: self.address.token},
            )

    def wait_until_ready(self, progress: Callable[[str], None]) -> None:
        """Wait until the server answers.

        Raises:
            SamplingError: The server ended or the timeout passed; it is stopped.
        """
        limit = self.spec.config.timeouts.startup_seconds
        started = time.monotonic()
        progress(f"starting vLLM on {self.spec.model} ({self.spec.dtype}), at most {limit:.0f} s")
        while not self.is_healthy():
            seconds = time.monotonic() - started
            if self._guard.poll() is not None or seconds > limit:
                what = f"did not answer within {limit:.0f} s" if self._guard.poll() is None else "ended as it started"
                log = self.log_tail()
                self.stop()
                raise SamplingError(
                    f"the engine {what}; its last lines:\n{log}",
                    where=self.spec.config.python or sys.executable,
                    fix="see the lines above, or raise engine.timeouts.startup_seconds",
                )
            time.sleep(0.1)
        progress(f"vLLM answers after {time.monotonic() - started:.0f} s")

    def is_healthy(self) -> bool:
        """Return True if the server runs and reports a running engine."""
        return self._guard.poll() is None and is_healthy(self.address)

    def log_tail(self) -> str:
        """Return the log's first error, which caused later ones, and its last lines."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        cause = [line for line in lines[:-_LOG_LINES] if _ERROR.search(line)][:1]
        return "\n".join(f"    {line[:300]}" for line in [*cause, *lines[-_LOG_LINES:]]) or "(nothing)"

    def stop(self) -> None:
        """Stop every process of the server and remove its folder."""
        self._guard.terminate()
        try:
            self._guard.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_healthy(address: Address) -> bool:
    """Return True if a server answers and reports a running engine."""
    try:
        return call(address, "/health", None, seconds=_HEALTH_SECONDS)[0] == 200
    except EngineUnreachableError:
        return False


def command(spec: ServerSpec, python: str, address: Address) -> list[str]:
    """Return the server's command line. The checkpoint's sampling defaults, which may filter, are not used."""
    config = spec.config
    options = {
        "model": spec.model,
        "host": address.host,
        "port": address.port,
        "middleware": f"{WORKER_PACKAGE}.gate.{Gate.__name__}",
        "dtype": spec.dtype,
        "max-model-len": spec.max_model_len,
        "max-num-seqs": spec.max_concurrent,
        "gpu-memory-utilization": spec.gpu_memory_utilization,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "generation-config": "vllm",
        "worker-extension-cls": spec.worker_class,
        "seed": 0,
    }
    if config.gpus.tensor_parallel > 1:
        options["tensor-parallel-size"] = config.gpus.tensor_parallel
    if config.kv_cache_gib > 0.0:
        options["kv-cache-memory-bytes"] = int(config.kv_cache_gib * 2**30)
    if spec.transfer not in BY_FILE:
        options["weight-transfer-config"] = json.dumps({"backend": spec.transfer})
    if spec.lora_rank:
        options["max-lora-rank"] = next(rank for rank in ADAPTER_RANKS if rank >= spec.lora_rank)
    switches = ["--enable-lora"] if spec.lora_rank else []
    switches += ["--tokens-only", "--disable-uvicorn-access-log"]
    switches += ["--enable-sleep-mode"] if spec.sleeps else []
    switches += ["--enforce-eager"] if spec.enforce_eager else []
    switches += [] if spec.prefill_in_parts else ["--no-enable-chunked-prefill"]
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *switches]


def environment(spec: ServerSpec, folder: Path) -> Mapping[str, str]:
    """Return the environment of the server: this process's without its Python path, with the routes for weights."""
    own = {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    # Rendezvous files and sockets of its processes, which a killed process would leave behind, are in the folder.
    own["TMPDIR"] = str(folder)
    # The compile cache of PyTorch stays outside the folder: each server would compile for a minute otherwise.
    compiled = Path(tempfile.gettempdir(), f"torchinductor_uid_{os.getuid()}")
    own["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(compiled)
    if len(str(folder)) > _SOCKET_FOLDER:
        own["VLLM_RPC_BASE_PATH"] = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    if spec.lora_rank:
        own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if spec.transfer == "ipc":  # vLLM pickles GPU memory handles; it listens only on the loopback interface
        own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if spec.devices:
        own["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    # Statistics are read from /metrics; in the log they would displace error lines.
    return {**os.environ, **own, "VLLM_LOG_STATS_INTERVAL": "86400"}


def visible_devices(devices: Sequence[int], named: str) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a process on ``devices``; ``named`` is the value in this process.

    vLLM's ``--device-ids`` does not work: without the variable, vLLM numbers GPUs in bus order and PyTorch by speed.
    """
    names = [name.strip() for name in named.split(",")] if named.strip() else []
    return ",".join(names[index] if names else str(index) for index in devices)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
