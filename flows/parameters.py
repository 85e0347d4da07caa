"""The parameters of deployments: their descriptions in the Prefect UI, and checks before a run is queued.

Prefect validates a request against the JSON schema of the flow's signature, so whatever a pattern can say is said
here; ``infra/services/parameters.py`` adds which stages each preset has. A key or a value that only the preset's own
types can judge ends the run within its first seconds.
Prefect takes a parameter's description from the flow's docstring alone.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlcore.tasks.presets.run import RunConfig

_PRESETS = sorted(file.stem for file in (Path(__file__).parent / "presets").glob("*.toml"))
_SECTIONS = sorted((*(each.name for each in fields(RunConfig)), "without"))

Preset = Annotated[
    str,
    Field(pattern=rf"^({'|'.join(_PRESETS)}|.+\.toml)$", examples=_PRESETS),
]
Override = Annotated[
    str, Field(pattern=rf"^({'|'.join(_SECTIONS)})(\.\w+)*=.+$", examples=["stages.grpo.learning_rate=1e-4"])
]
Overrides = tuple[Override, ...]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", examples=["grpo"])]
