"""Command that shows results."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from rlcore.flows.cli.parameters import Overrides, open_home


def show(
    what: Annotated[
        str, Parameter(help="A preset, or a registered model: tiny-grpo@champion or tiny-grpo/3.")
    ] = "tiny",
    /,
    *,
    overrides: Overrides = (),
) -> int:
    """Show the results of a preset (stages, comparison, report) or of a registered model (metrics, decision, files).

    Nothing runs. The exit code is 1 if the preset has no results.

    ```
    rlcore show mine.toml
    rlcore show tiny-grpo@champion
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.report.summary import show_model, show_preset

    if not what.endswith(".toml") and ("@" in what or "/" in what):
        sys.stdout.write(show_model(home, what))
        return 0
    from rlcore.flows.presets import open_preset
    from rlcore.flows.stages import stages
    from rlcore.tasks.pipeline.plan import cached_refs

    config = open_preset(what, overrides)
    table = stages(config)
    names = [stage.name for stage in table]
    refs = cached_refs(table, config, names, home=home)
    missing = [name for name in names if name not in refs]
    sys.stdout.write(show_preset(home, config.name, refs, missing))
    return 0 if refs else 1
