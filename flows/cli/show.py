"""Command that shows results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter

from rlcore.errors import RlcoreError
from rlcore.flows.cli.parameters import Overrides, open_home
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home


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
    from rlcore.tasks.keys.earlier_results import overrides_of_results
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
