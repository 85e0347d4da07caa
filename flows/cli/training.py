"""Commands that train: run, plan, retrain; and check the data of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rlcore.errors import ConfigError
from rlcore.flows.cli.parameters import Overrides, Preset, announce, open_home
from rlcore.tasks.store.settings import engine_name, use_inline_engine

if TYPE_CHECKING:
    from rlcore.flows.plan import RunPlan
    from rlcore.tasks.presets.data import DatasetConfig
    from rlcore.tasks.presets.graph import Graders
    from rlcore.tasks.store.artifacts import ArtifactRef

    DataSets = tuple[Mapping[str, DatasetConfig], int, Callable[[str], Graders | None]]

Contract = Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]


def run(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Run every stage of a preset: data, training, evaluation, comparison, report.

    Cached stages are skipped. After an interruption the same command resumes.

    ```
    rlcore run
    rlcore run mine.toml --set stages.grpo.learning_rate=2e-6 --set seed=1
    ```
    """
    home = open_home(reads=True)
    from rlcore.flows.plan import plan_run
    from rlcore.flows.presets import open_draft

    draft = open_draft(preset, overrides)
    if draft.config and not draft.errors:
        announce(draft.config, home)
    planned = plan_run(preset, overrides, is_verified=False)  # reject invalid presets before anything starts
    sys.stderr.write(f"{planned.summary}\n")
    if planned.is_cached and not os.environ.get("PREFECT_API_URL"):
        use_inline_engine()  # an embedded server would take longer to start than the rest of the run
    open_home()
    from rlcore.tasks.run.live_view import live_view

    started = time.perf_counter()
    with live_view():
        refs = _run_all(planned, preset, overrides)
    from rlcore.tasks.report.summary import summarise

    sys.stdout.write(summarise(home, planned.config.name, refs, seconds=time.perf_counter() - started))
    return 0


def _run_all(planned: RunPlan, preset: str, overrides: Sequence[str]) -> Mapping[str, ArtifactRef]:
    """Run every stage; the inline engine imports no Prefect."""
    if engine_name() == "inline":
        from rlcore.flows.run import run_targets
        from rlcore.tasks.run.interrupts import interruptible

        with interruptible():
            return run_targets(preset, overrides, [row.stage for row in planned.rows])
    from rlcore.flows.flows import post_train
    from rlcore.tasks.run.prefect_bridge import call_flow

    return call_flow(post_train, preset=preset, overrides=tuple(overrides))


def plan(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Show which stages are cached, which would run and why, their memory, disk and time; nothing runs.

    All errors that can be found before a run are listed by file: keys and values, the graph of the stages, the first
    rows of each data file, tokenizer and chat template, missing packages, memory and disk.

    ```
    rlcore plan mine.toml
    ```
    """
    open_home(reads=True)
    from rlcore.flows.plan import plan_run

    planned = plan_run(preset, overrides)
    from rlcore.tasks.keys.plan import format_plan

    sys.stdout.write("\n".join((format_plan(planned.rows), *planned.lines)) + "\n")
    return 0


def retrain(preset: Preset = "retrain", *, overrides: Overrides = ()) -> int:
    """Continue training the champion on new data, and promote a better model; without new data do nothing.

    ```
    rlcore retrain mine.toml
    ```
    """
    from rlcore.flows.presets import open_preset
    from rlcore.tasks.presets.settings import RetrainConfig

    config = open_preset(preset, overrides)
    config.section("retrain", RetrainConfig, where=preset)  # reject invalid presets before anything starts
    home = open_home()
    announce(config, home)
    from rlcore.flows.flows import retrain as retrain_flow
    from rlcore.tasks.run.live_view import live_view
    from rlcore.tasks.run.prefect_bridge import call_flow
    from rlcore.tasks.store.markdown import on_terminal

    with live_view():
        done = call_flow(retrain_flow, preset=preset, overrides=overrides)
    sys.stdout.write(f"{on_terminal(done.page)}\n{done.outcome}\n")
    return 0


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
