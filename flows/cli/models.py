"""Commands about registered models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Model, open_home


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
