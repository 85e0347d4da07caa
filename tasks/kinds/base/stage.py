"""Stages that import checkpoints: the base of a run, and models of the registry."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.base.source import import_sections, registered_version, source_files
from rlcore.tasks.kinds.kind import IMPORT, Lazy, Stage, sections

IMPORTED = Stage(
    name=IMPORT,
    version=1,
    kind="checkpoint",
    registered_as="base",
    run=Lazy("rlcore.tasks.kinds.base.step:run_import_sft"),
    sections=import_sections,
    source_digest=source_files,
)
"""The starting checkpoint of a run."""


def start_stage(name: str, model: str) -> Stage:
    """Return the stage that imports a registered model as starting point or reference policy."""
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        run=partial(Lazy("rlcore.tasks.kinds.base.step:run_start"), model=model),
        inputs=(IMPORT,),
        sections=sections(),
        source_digest=partial(registered_version, model=model),
    )
