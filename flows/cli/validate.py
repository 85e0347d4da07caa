"""Command that validates data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Overrides, open_home

if TYPE_CHECKING:
    from rlcore.tasks.pipeline.data_check import References
    from rlcore.tasks.presets.data import DatasetConfig

Contract = Literal["", "prompts", "code_tasks", "demonstrations", "preference_pairs"]


def validate(
    source: Annotated[str, Parameter(help="A preset, whose datasets are checked; or a .jsonl or .parquet file.")],
    /,
    *,
    contract: Annotated[Contract, Parameter(help="Row type of a file.", show_default=False)] = "",
    adapter: Annotated[
        str, Parameter(help="Adapter of a file, which makes contract columns of its rows.", show_default=False)
    ] = "",
    overrides: Overrides = (),
) -> int:
    """Check data against contracts without a run: accepted and rejected rows, with reasons.

    The exit code is 1 if a run would reject the data. Rules that need the tokenizer (length, special tokens) are left
    to the run.

    ```
    rlcore validate questions.jsonl --contract prompts
    rlcore validate train.jsonl --contract prompts --adapter gsm8k
    rlcore validate mine.toml
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.pipeline.data_check import check_data, reports_in

    sets, seed, references = _data_sets(source, contract, adapter, overrides)
    passed = True
    with reports_in(home) as folder:
        for name, config in sets.items():
            check = check_data(name, config, seed=seed, folder=folder / name, references=references(name))
            sys.stdout.write("\n".join(check.lines) + "\n")
            passed &= check.passed
    return 0 if passed else 1


def _data_sets(
    source: str, contract: Contract, adapter: str, overrides: Overrides
) -> tuple[Mapping[str, DatasetConfig], int, Callable[[str], References]]:
    """Return the datasets of a preset with the use of their reference answers, and its seed; or the one file."""
    from rlcore.flows.presets import open_preset
    from rlcore.tasks.pipeline.data_check import whole_file
    from rlcore.tasks.presets.graph import math_data

    if not source.endswith((".jsonl", ".parquet")):
        config = open_preset(source, overrides)
        compared = math_data(config)
        return config.data, config.seed, lambda name: "compared" if name in compared else "unused"
    if not contract:
        raise ConfigError(
            f"--contract is missing: the row type of {source} is unknown",
            where="--contract",
            fix="name one of prompts, code_tasks, demonstrations, preference_pairs",
        )
    return {Path(source).stem: whole_file(source, contract, adapter)}, 0, lambda _: "unknown"
