"""Parameters that several commands take, and their common set-up."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from rlcore.tasks.store.settings import Home, configure_environment, configure_logging, configure_reading, find_home

if TYPE_CHECKING:
    from rlcore.tasks.presets.run import RunConfig

_NEXT = re.compile(r"\s+(?=[A-Za-z_][\w.]*=(?!=)|$)")  # before the key of another override, or at the end
_NESTED = re.compile(r"""("(?:[^"\\]|\\.)*")|('[^']*')|([\[{(])|([\])}])""")


def split_overrides(text: str) -> tuple[str, ...]:
    """Split overrides: ``a.b=1 c=two words d=[{e='x', f=1}]`` has three, the second with a blank.

    A blank separates two overrides if ``key=`` follows it, outside of quotes and brackets.
    """
    found, begin, place, depth = [], 0, 0, 0
    while place < len(text):
        if nested := _NESTED.match(text, place):
            depth += bool(nested[3]) - bool(nested[4])
            place = nested.end()
        elif not depth and (parted := _NEXT.match(text, place)):
            found.append(text[begin:place])
            begin = place = parted.end()
        else:
            place += 1
    return tuple(each.strip() for each in (*found, text[begin:]) if each.strip())


def _overrides(_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(override for token in tokens for override in split_overrides(token.value))


Preset = Annotated[str, Parameter(help="A built-in preset such as tiny, or the path of a .toml file.")]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        converter=_overrides,
        show_default=False,
        help="Override a key of the preset; repeatable: stages.grpo.learning_rate=2e-6. The keys: rlcore config.",
    ),
]
Model = Annotated[str, Parameter(help="A registered model's version: tiny-grpo@champion or tiny-grpo/3.")]


def open_home(*, reads: bool = False, asks_mlflow: bool = False) -> Home:
    """Prepare and return the state directory, with this process's environment and log.

    ``reads``: the command only shows what is there, and creates no state directory. ``asks_mlflow``: it needs MLflow at
    once; a person does not wait for a server as long as a run.
    Raises:
        StorageError: it cannot be made or written.
        ServiceError: MLflow's server does not answer.
    """
    home = find_home()
    (configure_reading if reads else configure_environment)(home)
    configure_logging()
    if asks_mlflow and os.environ["MLFLOW_TRACKING_URI"].startswith("http"):
        from rlcore.tasks.operations.doctor import require_mlflow

        require_mlflow()
    return home


def announce(config: RunConfig, home: Home) -> None:
    """Say on standard error what begins, before the imports that take seconds."""
    start = " ".join(filter(None, (config.model.path, config.model.file))) or "a model from scratch"
    sys.stderr.write(f"{config.name}: {', '.join(config.stages)} from {start}; state in {home.root}\n")
    sys.stderr.flush()
