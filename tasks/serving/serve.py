"""Server of a registered model at an OpenAI-compatible address, with its chat template and EOS ids.

    serve_model(find_home(), "tiny-grpo@champion", host="127.0.0.1", port=8000)   # until Ctrl-C; returns the exit code

Call ``configure_environment`` before. The front (``front``) is the same for both engines: vLLM if its environment
exists, behind a loopback port with its own key, else the built-in engine.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import httpx
import torch

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError, ModelError, ServiceError
from rlcore.extras import engine_command
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.hardware.memory import free_bytes, total_bytes
from rlcore.models.architectures import positions_of
from rlcore.models.loading import load_policy
from rlcore.openai_api.guard import LOOPBACK, Limits
from rlcore.openai_api.server import Server, listen
from rlcore.sampling.vllm import guard
from rlcore.tasks.serving.engine import Engine, VllmEngine
from rlcore.tasks.serving.export import RegisteredVersion, open_registered
from rlcore.tasks.serving.front import Served, front
from rlcore.tasks.serving.native import NativeEngine
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.mlflow_model import is_chat_model
from rlcore.text.tokenization import ChatTokenizer

ServingEngine = Literal["auto", "vllm", "native"]
TOKEN = "RLCORE_SERVE_TOKEN"
_ENVIRONMENT = Path(".venv-engine", "bin", "python")  # as `make engine` makes it
_CPU, _CPU_SHARE = torch.device("cpu"), 0.5  # of free memory, for vLLM
_UNBOUNDED = 1 << 17  # positions of a model without a limit


def serve_model(
    home: Home,
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    engine: ServingEngine = "auto",
    python: str = "",
    allow_host: Sequence[str] = (),
    limits: Limits | None = None,
) -> int:
    """Serve ``tiny-grpo@champion`` or ``tiny-grpo/3`` at ``http://<host>:<port>/v1``; return the exit code.

    Requests name it by its registered name, ``tiny-grpo``, and carry a token: ``RLCORE_SERVE_TOKEN``, else one that is
    generated. ``python``: the interpreter of vLLM's environment, if it is neither this one nor
    ``.venv-engine``. ``allow_host``: names by which others reach this machine.
    Raises:
        ConfigError: there is no such engine here, or the token is invalid.
        ModelError: there is no such model, or it is a reward model.
        ServiceError: the address cannot be used, or vLLM does not start.
    """
    token, interpreter = _token(), _vllm_python(python)
    if engine == "vllm" and not interpreter:
        raise ConfigError("vLLM is not installed", fix=f"install it: {engine_command()}")
    with _ending_in_order(), open_registered(home, model) as registered, listen(host, port) as address:
        if not is_chat_model(registered.folder):
            raise ModelError(f"{model} is a reward model, which answers nothing", fix="name a policy")
        served = Served(
            name=registered.tags["name"],
            alias=model,
            tokenizer=ChatTokenizer.load(registered.folder),
            positions=min(positions_of(registered.folder), _UNBOUNDED),
        )
        with _engine(registered, served, interpreter if engine != "native" else "") as (computing, child):
            hosts = (*LOOPBACK, host, *allow_host)
            app = front(served, computing, token=token, hosts=hosts, limits=limits or Limits())
            server = Server(app)
            if child is not None:
                threading.Thread(target=_end_with, args=(child, server), daemon=True).start()
            _say(registered, token, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            return server.serve_until_signal(address)


def vllm_command(python: str, registered: RegisteredVersion, *, port: int, eager: bool) -> list[str]:
    """Return the command line of vLLM's server on a checkpoint, on the loopback address.

    It computes in the precision of the weights; by default it would round float32. ``eager``: skip compilation, which
    takes minutes on a CPU.
    """
    options = {
        "model": registered.folder,
        "served-model-name": registered.tags["name"],
        "host": "127.0.0.1",
        "port": port,
        "generation-config": "vllm",  # the checkpoint's may filter the distribution; EOS ids come with each request
        "dtype": read_json(registered.folder / "config.json").get("dtype") or "auto",
    }
    # On a CPU vLLM 0.32 crashes if requests have seeds and a prompt may be split over several steps.
    free, total = free_bytes(_CPU), total_bytes(_CPU)
    if eager and free and total:  # vLLM would take nearly all memory, which others use too
        options["gpu-memory-utilization"] = round(_CPU_SHARE * free / total, 3)
    switches = ["--disable-uvicorn-access-log", *(["--enforce-eager", "--no-enable-chunked-prefill"] if eager else [])]
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *switches]


def _token() -> str:
    given = os.environ.get(TOKEN)
    if given is None:
        return secrets.token_urlsafe(32)
    if not given.isascii() or not given.isprintable() or not given.strip() or given != given.strip():
        raise ConfigError("it is empty, or holds what a header cannot", where=TOKEN, fix="give letters and digits")
    return given


def _say(registered: RegisteredVersion, token: str, url: str) -> None:
    sys.stdout.write(f"{registered.tags['name']} version {registered.tags['version']}: {url}\n")
    sys.stdout.write("" if os.environ.get(TOKEN) else f"token: {token}\n")
    sys.stdout.write("Ctrl-C ends it.\n")
    sys.stdout.flush()


def _vllm_python(named: str) -> str:
    if named:
        return named
    if find_spec("vllm") is not None:
        return sys.executable
    return str(_ENVIRONMENT.absolute()) if _ENVIRONMENT.is_file() else ""


@contextmanager
def _engine(
    registered: RegisteredVersion, served: Served, interpreter: str
) -> Iterator[tuple[Engine, subprocess.Popen[bytes] | None]]:
    if not interpreter:
        device, dtype = choose_device_and_dtype(HardwareConfig())
        # A tokenizer is not thread-safe: this one writes, the front's reads.
        tokenizer = ChatTokenizer.load(registered.folder)
        yield NativeEngine(load_policy(registered.folder, device=device, dtype=dtype), tokenizer), None
        return
    key, port = secrets.token_urlsafe(32), _free_port()
    command = vllm_command(interpreter, registered, port=port, eager=not torch.cuda.is_available())
    # vLLM ends with this process, however it ends
    watched = [sys.executable, "-I", guard.__file__, str(os.getpid()), ""]
    child = subprocess.Popen([*watched, *command], env=_variables(interpreter) | {"VLLM_API_KEY": key})
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(child, url)
        yield VllmEngine(url, key, served.name, served.tokenizer.eos_ids), child
    finally:
        child.terminate()
        child.wait()


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn SIGTERM into an exception; the server installs its own handlers while it serves."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_until_ready(child: subprocess.Popen[bytes], url: str) -> None:
    while child.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=5.0).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ServiceError(f"vLLM ended with status {child.returncode} as it started", fix="its words stand above")


def _end_with(child: subprocess.Popen[bytes], server: Server) -> None:
    child.wait()
    server.should_exit = True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables(python: str) -> dict[str, str]:
    """Return this process's environment for vLLM: offline, because the model is local, and without rlcore's modules."""
    kept = {name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "VLLM_NO_USAGE_STATS": "1"}
