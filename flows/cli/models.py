"""Commands about registered models: promote, roll back, trace, reproduce, deliver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Model, Overrides, Preset, announce, open_home

_DAY = 86_400  # seconds


def promote(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Compare a preset's challenger with the champion, and promote it if it is better.

    The section [promotion] names the challenger and the allowed losses.

    ```
    rlcore promote mine.toml
    ```
    """
    from rlcore.flows.presets import open_preset

    config = open_preset(preset, overrides)  # reject invalid presets before anything starts
    home = open_home()
    announce(config, home)
    from rlcore.flows.flows import promote as promote_flow
    from rlcore.tasks.run.live_view import live_view
    from rlcore.tasks.run.pages import page_folder
    from rlcore.tasks.run.prefect_bridge import call_flow
    from rlcore.tasks.store.markdown import on_terminal

    with live_view():
        refs = call_flow(promote_flow, preset=preset, overrides=overrides)
    page = page_folder(home, config.name, "promote", refs["promote"]) / "verdict.md"
    sys.stdout.write(on_terminal(page.read_text(encoding="utf-8")))
    return 0


def rollback(
    model: Annotated[str, Parameter(help="The version to roll back, which must be the champion: tiny-grpo/3.")],
    /,
    *,
    reason: Annotated[str, Parameter(help="The reason, for the version's tags.")],
) -> int:
    """Roll back a champion: the previous champion becomes champion again.

    ```
    rlcore rollback tiny-grpo/3 --reason "answers got longer"
    ```
    """
    home = open_home(reads=True, asks_mlflow=True)
    from rlcore.tasks.tracking.registry import read_version

    found = read_version(home, model)  # reject unknown versions before anything starts
    from rlcore.flows.flows import rollback as rollback_flow
    from rlcore.tasks.run.prefect_bridge import call_flow

    sys.stdout.write(call_flow(rollback_flow, found["name"], int(found["version"]), reason) + "\n")
    return 0


def lineage(
    model: Annotated[str, Parameter(help="A registered model: tiny-grpo@champion or tiny-grpo/3.")] = "",
    /,
    *,
    rows: Annotated[Path | None, Parameter(help='Rows as a dataset has them, or {"prompt": "…"} a line.')] = None,
) -> int:
    """Show the lineage of a registered model down to the raw rows, or the models that descend from rows.

    A model's lineage is also written as an SVG file. With `--rows`, each dataset snapshot that holds one of the rows is
    shown with its models; the exit code is 1 if none holds one. Two rows are the same if their prompts are, without
    case, blanks and system prompts.

    ```
    rlcore lineage tiny-grpo@champion
    rlcore lineage --rows request.jsonl
    ```
    """
    if bool(model) == (rows is not None):
        raise ConfigError("lineage needs a model, or --rows with a file", fix="rlcore lineage tiny-grpo@champion")
    home = open_home(reads=True, asks_mlflow=True)
    if rows is not None:
        from rlcore.tasks.operations.rows import find_rows

        num_found, lines = find_rows(home, rows)
        sys.stdout.write("\n".join(lines) + "\n")
        return 0 if num_found else 1
    from rlcore.tasks.tracking.lineage import find_lineage, tree_text

    tags, root = find_lineage(home, model)
    sys.stdout.write(tree_text(tags, root))
    return 0


def reproduce(
    model: Model,
    /,
    *,
    preset: Annotated[str, Parameter(help="Path of its preset, if it is not built-in.")] = "",
    force: Annotated[bool, Parameter(help="Run although code, versions or the machine have changed.")] = False,
) -> int:
    """Rerun the stages of a model in a scratch directory and compare the bytes; exit code 1 if they differ.

    ```
    rlcore reproduce tiny-grpo@champion
    ```
    """
    open_home(reads=True, asks_mlflow=True)
    from rlcore.flows.reproduce import run_reproduce

    done = run_reproduce(model, preset, force=force)
    sys.stdout.write("\n".join(done.lines) + "\n")
    return 0 if done.is_equal else 1


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
