"""Commands that show: results, keys, user interfaces, this machine, an agent."""

from __future__ import annotations

import difflib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter, validators

from rlcore.errors import ConfigError, RlcoreError
from rlcore.flows.cli.parameters import Overrides, Preset, open_home
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home, use_inline_engine

Episodes = Annotated[int, Parameter(help="Number of episodes.", validator=validators.Number(gte=1))]


def show(
    what: Annotated[
        str, Parameter(help="A preset, or a registered model: tiny-grpo@champion or tiny-grpo/3.")
    ] = "tiny",
    /,
    *,
    overrides: Overrides = (),
) -> int:
    """Show a preset's results (stages, comparison, report, versions) or a registered model (metrics, decision, files).

    Nothing runs. The exit code is 1 if the preset has no results.

    ```
    rlcore show mine.toml
    rlcore show tiny-grpo@champion
    ```
    """
    is_model = not what.endswith(".toml") and ("@" in what or "/" in what)
    home = open_home(reads=True, asks_mlflow=is_model)
    if is_model:
        from rlcore.tasks.report.summary import show_model

        sys.stdout.write(show_model(home, what))
        return 0
    from rlcore.flows.presets import open_preset

    config = open_preset(what, overrides)
    if not any(home.cache.glob("*/*")):  # to compute keys would take seconds, for nothing
        sys.stdout.write(_nothing_run(what, overrides, home))
        return 1
    from rlcore.flows.stages import stages
    from rlcore.tasks.keys.plan import look_up
    from rlcore.tasks.report.summary import show_preset

    table = stages(config)
    rows, refs = look_up(table, config, [stage.name for stage in table], home=home)
    models = [f"{config.name}-{stage.registered_as}" for stage in table if stage.registered_as]
    sys.stdout.write(show_preset(home, config.name, refs, rows, models))
    sys.stdout.write(_of_other_settings(what, overrides, refs, home))
    return 0 if refs else 1


def _nothing_run(what: str, overrides: Sequence[str], home: Home) -> str:
    arguments = shlex.join([what, *(word for each in overrides for word in ("--set", each))])
    return (
        f"no results in {home.root}: nothing was run\n"
        f"to see what a run does: rlcore plan {arguments}\n"
        f"to run it: rlcore run {arguments}\n"
        "to show results of another folder: set RLCORE_HOME to its .rlcore\n"
    )


def _of_other_settings(what: str, overrides: Sequence[str], refs: Mapping[str, ArtifactRef], home: Home) -> str:
    """Return the command that shows results of other settings, if the home has some that this one does not show."""
    from rlcore.flows.presets import open_preset
    from rlcore.flows.stages import stages
    from rlcore.tasks.keys.earlier_work import overrides_of_results
    from rlcore.tasks.keys.plan import recorded_refs
    from rlcore.tasks.store.cache import StageCache

    config = open_preset(what, overrides)
    other = (*overrides, *overrides_of_results(stages(config), config, refs, StageCache(home.cache)))
    try:
        config = open_preset(what, other)
        table = stages(config)
        found = recorded_refs(table, config, [stage.name for stage in table], home=home)
    except RlcoreError:  # the results are of a preset with other stages or data
        return ""
    if not found.keys() - refs.keys():
        return ""
    return f"to show those: rlcore show {what} {shlex.join(word for each in other for word in ('--set', each))}\n"


def config(
    preset: Preset = "tiny",
    key: Annotated[str, Parameter(help="A section or a key, such as stages.grpo.kl; default: all.")] = "",
    *,
    overrides: Overrides = (),
    markdown: Annotated[bool, Parameter(help="Print the page of all preset keys.")] = False,
    schema: Annotated[bool, Parameter(help="Print a JSON Schema of preset files, for editors.")] = False,
) -> int:
    """Print a complete preset as TOML: every key with its type, default, limits, comment, and source file.

    ```
    rlcore config mine.toml stages.grpo
    rlcore config tiny hardware.dtype
    rlcore config --schema > preset.schema.json      # first line of a preset: #:schema ./preset.schema.json
    ```
    """
    from rlcore.tasks.presets.key_reference import as_markdown, preset_schema

    if schema:
        sys.stdout.write(json.dumps(preset_schema(), indent=1) + "\n")
    else:
        sys.stdout.write(as_markdown() if markdown else _described(preset, key, overrides))
    return 0


def _described(preset: str, key: str, overrides: Overrides) -> str:
    from rlcore.config import to_dict
    from rlcore.flows.presets import FOLDER, open_preset, preset_path
    from rlcore.tasks.presets.key_reference import as_toml, describe, origins, select_keys
    from rlcore.tasks.presets.peers import meant

    config = open_preset(preset, overrides)
    sections = describe(config)
    found = select_keys(sections, key)
    if not found:
        known = [f"{section.path}.{each.name}".lstrip(".") for section in sections for each in section.keys]
        close = difflib.get_close_matches(key, [*known, *(section.path for section in sections)], n=3)
        nearest = f"did you mean {', '.join(close)}?" if close else f"rlcore config {preset} prints all of them"
        raise ConfigError(f"the preset has no section or key {key!r}", fix=meant(to_dict(config), key, None) or nearest)
    return as_toml(found, origins(preset_path(preset), FOLDER, overrides))


def ui(
    *,
    mlflow_port: Annotated[int, Parameter(help="Port of MLflow: runs, curves, models.")] = 5000,
    prefect_port: Annotated[int, Parameter(help="Port of Prefect: stages and their dependencies.")] = 4200,
) -> int:
    """Open the MLflow and Prefect interfaces over the results; Ctrl-C ends both.

    ```
    rlcore ui --mlflow-port 5001
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.operations.ui_servers import serve

    return serve(home, mlflow_port=mlflow_port, prefect_port=prefect_port)


def agent_check(
    preset: Preset,
    /,
    *,
    stage: Annotated[str, Parameter(help="The RL stage; default: the first with an agent.", show_default=False)] = "",
    episodes: Episodes = 3,
    overrides: Overrides = (),
) -> int:
    """Play episodes of a preset's agent with the model that its stage starts from, and show each call.

    The tree has the tokens of each call, and why a call begins a new sample. Then follow the reward, and what is wrong
    with the agent. The exit code is 1 if an episode failed.

    ```
    rlcore agent-check mine.toml
    ```
    """
    use_inline_engine()
    home = open_home()
    from rlcore.flows.agent_check import run_agent_check

    found = run_agent_check(home, preset, overrides, stage=stage, count=episodes)
    sys.stdout.write("\n".join(found.lines) + "\n")
    return 0 if found.passed else 1


def doctor(
    *, services: Annotated[bool, Parameter(help="Check the servers and their schedules instead.")] = False
) -> int:
    """Check this machine: device, precision, engines, sandbox, servers, disk, memory, versions.

    A line that begins with MISSING names a requirement of the demo, and the exit code is 1. A line that begins with -
    names a requirement of some recipes only. With `--services` the lines are about servers, worker, scheduler,
    deployments, dumps and disk.

    ```
    rlcore doctor
    rlcore doctor --services
    ```
    """
    from rlcore.tasks.operations.doctor import check_services, lines, run_checks
    from rlcore.tasks.store.settings import find_home

    errors = 0
    for finding in (check_services if services else run_checks)(find_home()):
        errors += finding.state == "missing"
        sys.stdout.write(lines(finding) + "\n")
        sys.stdout.flush()
    if not services:
        ending = f"{errors} of these keep the demo from running" if errors else "the demo can run: rlcore run"
        sys.stdout.write(ending + "\n")
    return 1 if errors else 0
