"""Parameters of deployments: descriptions in the Prefect UI, and checks before a run is queued.

Prefect validates a request against the JSON schema of the flow's signature, so patterns check what they can;
``infra/services/parameters.py`` adds the stages of each preset. Other invalid keys and values end the run within its
first seconds. Prefect reads a parameter's description from the flow's docstring only.
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
Algorithm = Annotated[str, Field(pattern=r"^[a-z0-9_+]*$", examples=["grpo"])]
Version = Annotated[str, Field(pattern=r"^.+/[0-9]+$", examples=["tiny-grpo/4"])]
Document = Annotated[str, Field(pattern=r"^\s*\{.*\}\s*$")]
Signature = Annotated[str, Field(pattern="^-----BEGIN SSH SIGNATURE-----")]
