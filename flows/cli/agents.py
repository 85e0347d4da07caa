"""Command that checks agents."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter, validators

from rlcore.flows.cli.parameters import Overrides, Preset, open_home
from rlcore.tasks.store.settings import use_inline_engine

Episodes = Annotated[int, Parameter(help="Number of episodes.", validator=validators.Number(gte=1))]


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
