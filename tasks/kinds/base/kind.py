"""Stages that import checkpoints: the base of a run, and models of the registry."""

from __future__ import annotations

from functools import partial

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.files import source_digest
from rlcore.tasks.kinds.kind import IMPORT, Lazy, Stage, sections
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.store.settings import find_home


def registered_version(config: Sections, *, model: str) -> str:
    """Return the version that ``models:/name@alias`` names now, for the stage's key.

    Raises:
        ModelError: the registry has no such version.
    """
    return source_files(Sections({"model": ModelConfig(source="registry", path=model)}))


def import_sections(config: RunConfig) -> Sections:
    """Select the sections of an import. Only a model from scratch, whose weights are drawn, needs the machine."""
    return sections_of(config, ("model", "hardware") if config.model.source == "scratch" else ("model",))


def source_files(config: Sections) -> str:
    """Return a digest of the checkpoint's source, for the stage's key; empty if the configuration determines it.

    An alias in a registry URI counts as the version that it names now: moving the alias reruns the import.
    """
    model: ModelConfig = config.model
    if model.source != "registry":
        return source_digest(model)
    from rlcore.tasks.tracking.registry import find_version
    from rlcore.tasks.tracking.runs import open_tracker

    name, _, alias = model.path.removeprefix("models:/").partition("@")
    if not alias:
        return model.path
    version = find_version(open_tracker(find_home()), name, alias)
    if version is None:
        raise ModelError(
            f"no version of {name!r} carries the alias {alias!r}", where="model.path", fix="promote a version first"
        )
    return f"{version.name}/{version.version}"


IMPORTED = Stage(
    name=IMPORT,
    artifact="checkpoint",
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
        artifact="checkpoint",
        run=partial(Lazy("rlcore.tasks.kinds.base.step:run_start"), model=model),
        inputs=(IMPORT,),
        sections=sections(),
        source_digest=partial(registered_version, model=model),
    )
