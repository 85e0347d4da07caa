"""Commands that deliver a registered model: as a folder for other libraries, or behind an address."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Model, open_home

_DAY = 86_400  # seconds


def export(
    model: Model,
    folder: Annotated[Path, Parameter(help="New or empty folder for the files.")],
    /,
    *,
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"],
        Parameter(help="Precision of the weights; keep: the checkpoint's."),
    ] = "keep",
    push: Annotated[
        str, Parameter(help="OWNER/NAME of a repository of the hub to upload the folder to.", show_default=False)
    ] = "",
    public: Annotated[bool, Parameter(help="Make a new repository public; default: private.")] = False,
    dry_run: Annotated[bool, Parameter(help="Write only the card that --push would upload.")] = False,
) -> int:
    """Export a registered model as a folder that transformers, vLLM and model hubs load.

    It has safetensors with merged LoRAs, the tokenizer with its chat template, the generation configuration with all
    EOS ids, and the model card as README.md.

    ```
    rlcore export tiny-grpo@champion exported
    rlcore export mine-grpo/3 exported --dtype bfloat16
    rlcore export mine-grpo/3 exported --push me/mine --dry-run     # look at exported/README.md
    ```

    Load it without rlcore: `AutoModelForCausalLM.from_pretrained("exported")`. For GGUF run llama.cpp's
    convert_hf_to_gguf.py on the folder. `--push` takes the token of
    `hf auth login` or HF_TOKEN, and the hub of HF_ENDPOINT.
    """
    if (public or dry_run) and not push:
        raise ConfigError("--public and --dry-run are about an upload", fix="add --push OWNER/NAME")
    home = open_home(reads=True, asks_mlflow=True)
    from rlcore.tasks.serving.export import check_target, export_card, export_model, push_folder

    if push:
        check_target(push, needs_token=not dry_run)
    if dry_run:
        sys.stdout.write(f"the card is in {export_card(home, model, folder, repo=push).absolute()}\n")
        return 0
    written = export_model(home, model, folder, dtype=dtype, repo=push)
    sys.stdout.write(f"{model} is in {written.absolute()}\n")
    if push:
        sys.stdout.write(f"uploaded: {push_folder(written, push, private=not public)}\n")
    return 0


def serve(
    model: Model,
    /,
    *,
    host: Annotated[str, Parameter(help="Address to listen on; 0.0.0.0 admits other machines.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on.")] = 8000,
    engine: Annotated[
        Literal["auto", "vllm", "native"],
        Parameter(help="Engine. auto: vLLM if it is installed, else the native engine."),
    ] = "auto",
    python: Annotated[
        str, Parameter(help="Interpreter with vLLM, if it is not in .venv-engine.", show_default=False)
    ] = "",
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(help="A name by which others reach this machine; may be repeated.", show_default=False),
    ] = (),
    timeout: Annotated[float, Parameter(help="Maximum seconds of a request.")] = 300.0,
    max_concurrent: Annotated[int, Parameter(help="Number of concurrent requests; more are rejected.")] = 64,
) -> int:
    """Serve a registered model at an OpenAI-compatible address, with its chat template and EOS ids, until Ctrl-C.

    A request names the model as here, or by its registered name alone. It carries the token: RLCORE_SERVE_TOKEN, else
    one that is generated and printed.

    ```
    rlcore serve tiny-grpo@champion --port 8001
    curl http://127.0.0.1:8001/v1/chat/completions -H "Authorization: Bearer $TOKEN" --json \\
        '{"model": "tiny-grpo", "messages": [{"role": "user", "content": "4+3"}], "temperature": 0}'
    ```
    """
    home = open_home(reads=True, asks_mlflow=True)
    from rlcore.openai_api.guard import Limits
    from rlcore.tasks.serving.serve import serve_model

    if not 0 < timeout <= _DAY or max_concurrent < 1:
        raise ConfigError(f"--timeout has to be above 0 and at most {_DAY}, --max-concurrent 1 or more")
    limits = Limits(concurrent=max_concurrent, seconds=timeout)
    return serve_model(
        home, model, host=host, port=port, engine=engine, python=python, allow_host=allow_host, limits=limits
    )
