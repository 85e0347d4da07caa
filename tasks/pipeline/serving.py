"""A registered model behind an OpenAI-compatible address, with its own chat template and EOS ids, until it is ended.

    serve_model(find_home(), "tiny-grpo@champion", host="127.0.0.1", port=8000)   # until Ctrl-C; gives the exit code

:func:`tasks.home.settings.configure_environment` is to be called before. By vLLM where its environment is there, else
by the server of transformers, which is enough for a small model on a CPU. MLflow's own server,
``mlflow models serve -m models:/tiny-grpo@champion --env-manager local``, works too; it has an address of its own kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from rlcore.errors import ConfigError, ModelError
from tasks.home.settings import Home
from tasks.home.storage import read_json
from tasks.pipeline.delivery import Registered, open_registered
from tasks.tracking.packaged import is_chat_model

ServingEngine = Literal["auto", "vllm", "transformers"]
_ENVIRONMENT = Path(".venv-engine", "bin", "python")  # as `make engine` makes it
_NEEDED = ("fastapi", "uvicorn", "openai")  # by the server of transformers
_GENERATION = "generation_config.json"
# What OpenAI's clients expect: draws from the whole distribution, unless the request asks for another temperature.
_DRAWS = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def serve_model(
    home: Home,
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    engine: ServingEngine = "auto",
    python: str = "",
) -> int:
    """Serve ``tiny-grpo@champion`` or ``tiny-grpo/3`` at ``http://<host>:<port>/v1``; returns the server's exit code.

    Requests call it by its registered name, ``tiny-grpo``. ``python``: the interpreter of vLLM's environment, where
    it is neither this one nor ``.venv-engine``.

    Raises:
        ConfigError: there is no such engine here.
        ModelError: there is no such model, or it is a reward model.
    """
    interpreter = _vllm_python(python)
    if engine == "vllm" and not interpreter:
        raise ConfigError("vLLM is not installed", fix="`make engine` installs it into .venv-engine")
    with open_registered(home, model) as registered, tempfile.TemporaryDirectory() as folder:
        if not is_chat_model(registered.folder):
            raise ModelError(f"{model} is a reward model, which answers nothing", fix="name a policy")
        if interpreter and engine != "transformers":
            eager = not torch.cuda.is_available()
            command = vllm_command(interpreter, registered, host=host, port=port, eager=eager)
        else:
            command = _transformers_command(registered, Path(folder), host=host, port=port)
        sys.stdout.write(f"{registered.tags['name']} version {registered.tags['version']}: http://{host}:{port}/v1\n")
        sys.stdout.flush()
        return _run(command, Path(folder), _variables(Path(folder), command[0]))


def vllm_command(python: str, registered: Registered, *, host: str, port: int, eager: bool) -> list[str]:
    """vLLM's server on a checkpoint: it reads the template from the tokenizer and the EOS ids from the generation
    configuration beside the weights. It computes in the precision of the weights; by itself it would round float32.
    ``eager``: it compiles nothing, which takes minutes on a CPU.
    """
    options = {
        "model": registered.folder,
        "served-model-name": registered.tags["name"],
        "host": host,
        "port": port,
        "generation-config": "auto",
        "dtype": read_json(registered.folder / "config.json").get("dtype") or "auto",
    }
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *(["--enforce-eager"] if eager else [])]


def _vllm_python(named: str) -> str:
    if named:
        return named
    if find_spec("vllm") is not None:
        return sys.executable
    return str(_ENVIRONMENT.absolute()) if _ENVIRONMENT.is_file() else ""


def _transformers_command(registered: Registered, folder: Path, *, host: str, port: int) -> list[str]:
    """The server names a model by its path. So the folder has the model's name, and the server starts in its parent."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the server of transformers needs {', '.join(missing)}",
            fix="pip install 'rlcore[serve]', or `make engine` for vLLM",
        )
    name = registered.tags["name"]
    (folder / name).mkdir()
    for path in registered.folder.iterdir():
        if path.is_file() and path.name != _GENERATION:
            (folder / name / path.name).symlink_to(path)
    settings = read_json(registered.folder / _GENERATION)
    (folder / name / _GENERATION).write_text(json.dumps(settings | _DRAWS), encoding="utf-8")
    code = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-c", code, "serve", name, "--host", host, "--port", str(port)]


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> int:
    """Run a server to its end; a signal that ends this process ends the server too."""
    server = subprocess.Popen(command, cwd=folder, env=dict(variables))
    previous = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        code = server.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the server as well
        code = server.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 128 - code if code < 0 else code  # as shells say that a signal has ended it


def _variables(folder: Path, python: str) -> Mapping[str, str]:
    """This process's; the model is here, so nobody asks a hub for anything. Ours are no modules of another python."""
    kept = {name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"}
    cache = folder / "hub"
    cache.mkdir()  # the server of transformers lists what is in there
    ours = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_CACHE": str(cache)}
    return kept | ours | {"VLLM_NO_USAGE_STATS": "1"}
