"""A vLLM server as a child of this process: its command line, its start within a deadline, its log and its end."""

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
from rlcore.sampling.vllm import guard
from rlcore.sampling.vllm.client import Address, EngineUnreachableError, call
from rlcore.sampling.vllm.worker.gate import TOKEN, Gate

ALONE = 0.85  # of a GPU's memory, for a server that shares it with nothing
WORKER_FOLDER = Path(__file__).with_name("worker")
WORKER_PACKAGE = "rlcore_worker"  # its name in the engine's environment
WORKER_CLASS = f"{WORKER_PACKAGE}.receiver.WeightReceiver"
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has room; a smaller one has more than it needs
_LOG_LINES = 15
_ERROR = re.compile(r" ERROR .*\w(Error|Exception): ")
_SOCKET_FOLDER = 70  # characters, so that a socket's path, which has 37 more, is one that the kernel takes
_HEALTH_SECONDS = 10.0
_STOP_SECONDS = guard.GRACE_SECONDS + 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What a server serves, and how.

    ``exchange``: the folder of the weight files. ``dtype``: the name of a torch type. ``url``: that of a running
    server; empty if one is to be started. ``transfer``: how the weights get there, never ``auto``.

    ``devices``: GPUs among those that this process sees; none on a CPU. ``memory_fraction``: the share of their memory
    that the server takes. ``eager``: no CUDA graphs. ``trainer_moves``: the trainer's weights change while the server
    samples. ``adapter_rank``: the rank of the adapters that are sent as such; 0: none are.

    ``prefill_in_parts``: chunked prefill. A prompt that is longer than one step takes is spread over several steps.
    vLLM 0.32 crashes on a CPU if it is on and requests have seeds of their own. ``worker_class`` takes the weights;
    ``worker_file``: a file that it may import, if the class is not ours.
    """

    model: Path
    exchange: Path
    config: EngineConfig
    dtype: str
    max_model_len: int
    max_concurrent: int
    url: str = ""
    transfer: TransferKind = "file"
    devices: tuple[int, ...] = ()
    memory_fraction: float = ALONE
    eager: bool = True
    trainer_moves: bool = False
    adapter_rank: int = 0
    prefill_in_parts: bool = False
    worker_file: Path | None = None
    worker_class: str = WORKER_CLASS


class ServerProcess:
    """One server, from its start to its end. When this process ends, :mod:`rlcore.sampling.vllm.guard` ends the server.

    ``folder``: the server's own, with its log, the worker's module and its temporary files. It is removed when the
    server stops.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """
        Raises:
            SamplingError: there is no such interpreter.
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
            f"{self.folder}{os.pathsep}{spec.exchange}",
        ]
        python = spec.config.python or sys.executable
        if shutil.which(python) is None:
            shutil.rmtree(self.folder)
            raise SamplingError(
                f"there is no interpreter {python}",
                where="engine.python",
                fix="`make engine` creates .venv-engine/bin/python",
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
        """Return when the server answers.

        Raises:
            SamplingError: the server ended, or the deadline passed; it is stopped then. The message has the last lines
                of its log.
        """
        limit = self.spec.config.timeouts.startup_seconds
        started = time.monotonic()
        progress(f"starting vLLM on {self.spec.model} ({self.spec.dtype}), at most {limit:.0f} s")
        while not self.is_healthy():
            seconds = time.monotonic() - started
            if self._guard.poll() is not None or seconds > limit:
                what = f"did not answer within {limit:.0f} s" if self._guard.poll() is None else "ended as it started"
                said = self.log_tail()
                self.stop()
                raise SamplingError(
                    f"the engine {what}; its last lines:\n{said}",
                    where=self.spec.config.python or sys.executable,
                    fix="see the lines above; engine.timeouts.startup_seconds is the deadline",
                )
            time.sleep(0.5)
        progress(f"vLLM answers after {time.monotonic() - started:.0f} s")

    def is_healthy(self) -> bool:
        """Whether the server runs, and says that its engine runs."""
        return self._guard.poll() is None and is_healthy(self.address)

    def log_tail(self) -> str:
        """The first error in the engine's log, which caused the later ones, and the log's last lines."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        cause = [line for line in lines[:-_LOG_LINES] if _ERROR.search(line)][:1]
        return "\n".join(f"    {line[:300]}" for line in [*cause, *lines[-_LOG_LINES:]]) or "(nothing)"

    def stop(self) -> None:
        """End every process of the server and remove its folder."""
        self._guard.terminate()
        try:
            self._guard.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_healthy(address: Address) -> bool:
    """Whether a server answers at the address, and says that its engine runs."""
    try:
        return call(address, "/health", None, seconds=_HEALTH_SECONDS)[0] == 200
    except EngineUnreachableError:
        return False


def command(spec: ServerSpec, python: str, address: Address) -> list[str]:
    """The server's command line. The checkpoint's sampling defaults are not read: they may filter the distribution."""
    config = spec.config
    options = {
        "model": spec.model,
        "host": address.host,
        "port": address.port,
        "middleware": f"{WORKER_PACKAGE}.gate.{Gate.__name__}",
        "dtype": spec.dtype,
        "max-model-len": spec.max_model_len,
        "max-num-seqs": spec.max_concurrent,
        "gpu-memory-utilization": spec.memory_fraction,
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
    if spec.transfer != "file":
        options["weight-transfer-config"] = json.dumps({"backend": spec.transfer})
    if spec.adapter_rank:
        options["max-lora-rank"] = next(rank for rank in ADAPTER_RANKS if rank >= spec.adapter_rank)
    switches = ["--enable-lora"] if spec.adapter_rank else []
    switches += ["--tokens-only", "--disable-uvicorn-access-log"]
    switches += ["--enforce-eager"] if spec.eager else []
    switches += [] if spec.prefill_in_parts else ["--no-enable-chunked-prefill"]
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *switches]


def environment(spec: ServerSpec, folder: Path) -> Mapping[str, str]:
    """This process's variables without its Python path, and those that open the server's routes for weights."""
    ours = {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    # Where its processes meet: a file that a killed one would leave for good, and sockets. They go with the folder.
    ours["TMPDIR"] = str(folder)
    # What PyTorch compiles stays where it would be, for the next server: each would compile for a minute otherwise.
    compiled = Path(tempfile.gettempdir(), f"torchinductor_uid_{os.getuid()}")
    ours["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(compiled)
    if len(str(folder)) > _SOCKET_FOLDER:
        ours["VLLM_RPC_BASE_PATH"] = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    if spec.adapter_rank:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if spec.transfer == "ipc":  # vLLM pickles the handles of GPU memory; it listens on the loopback interface alone
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if spec.devices:
        ours["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    # Its figures are read from /metrics; in its log they would push out the lines that say why it ended.
    return {**os.environ, **ours, "VLLM_LOG_STATS_INTERVAL": "86400"}


def visible_devices(devices: Sequence[int], named: str) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a process that computes on ``devices``; ``named`` is the value in this process.

    vLLM's ``--device-ids`` will not do: where the variable is not set, vLLM counts GPUs in the order of the bus, and
    PyTorch in the order of their speed.
    """
    names = [name.strip() for name in named.split(",")] if named.strip() else []
    return ",".join(names[index] if names else str(index) for index in devices)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
