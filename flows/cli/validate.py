"""Command that validates data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Overrides, open_home

if TYPE_CHECKING:
    from rlcore.tasks.presets.data import DatasetConfig
    from rlcore.tasks.presets.graph import Graders

    DataSets = tuple[Mapping[str, DatasetConfig], int, Callable[[str], Graders | None]]

Contract = Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]


def validate(
    source: Annotated[str, Parameter(help="A preset, whose datasets are checked; or a file of rows.")],
    /,
    *,
    contract: Annotated[Contract | None, Parameter(help="Row type of a file.", show_default=False)] = None,
    adapter: Annotated[
        str, Parameter(help="Adapter of a file, which makes contract columns of its rows.", show_default=False)
    ] = "",
    overrides: Overrides = (),
) -> int:
    """Check data against contracts without a run: accepted and rejected rows, with reasons.

    A file without contract and adapter is checked with the layout that its columns fit; the command prints the lines
    for the preset, or the columns that it found and a mapping to complete. Files are JSON (.jsonl, or .json for an
    array), .parquet, .csv and .tsv, with .gz or .zst too; a pattern in quotes and a folder are read as one file.

    The exit code is 1 if a run would reject the data. Rules that need the tokenizer (length, special tokens) are left
    to the run.

    ```
    rlcore validate rows.jsonl
    rlcore validate train.jsonl --adapter gsm8k
    rlcore validate mine.toml
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.preflight.data_check import check_data, is_file_of_rows, recognize, reports_in

    is_file = is_file_of_rows(source)
    if is_file and overrides:
        raise ConfigError(f"--set changes a preset, and {source} has rows", where="--set", fix="leave it out")
    if is_file and not contract and not adapter:
        found = recognize(source)
        sys.stdout.write("\n".join(found.lines) + "\n")
        adapter = found.adapter
        if not adapter:
            return 1
    sets, seed, graders = _of_file(source, contract, adapter) if is_file else _of_preset(source, overrides)
    passed = True
    with reports_in(home) as folder:
        for name, config in sets.items():
            check = check_data(name, config, seed=seed, folder=folder / name, graders=graders(name))
            sys.stdout.write("\n".join(check.lines) + "\n")
            passed &= check.passed
    if is_file and not adapter and not passed and Path(source).exists():
        sys.stdout.write("\n".join(recognize(source).lines) + "\n")
    return 0 if passed else 1


def _of_preset(source: str, overrides: Overrides) -> DataSets:
    from rlcore.flows.presets import open_preset
    from rlcore.tasks.presets.graph import graders_of

    config = open_preset(source, overrides)
    return config.data, config.seed, lambda name: graders_of(config, name)


def _of_file(source: str, contract: Contract | None, adapter: str) -> DataSets:
    from rlcore.tasks.preflight.data_check import contract_for, whole_file

    config = whole_file(source, contract or contract_for(adapter), adapter)
    name = Path(source).parent.name or "rows" if has_magic(source) else Path(source).stem
    return {name: config}, 0, lambda _: None
