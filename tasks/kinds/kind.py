"""A stage, and a kind of stages, as the pipeline knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rlcore.errors import ConfigError
from rlcore.tasks.drawing.result import Draw
from rlcore.tasks.kinds import KINDS, load
from rlcore.tasks.kinds.facts import BASE
from rlcore.tasks.presets.chosen import chosen_by
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of, stage_sections
from rlcore.tasks.steps.base import StageContext, StageResult, prepare_stage_name
from rlcore.tasks.store.imports import Chosen

IMPORT = "import_sft"


def no_files(config: Sections) -> str:
    """The ``source_digest`` of a stage that reads nothing but its inputs."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a pipeline, with what it depends on and what is made of its result.

    ``inputs`` names upstream stages. ``sections`` declares what the step reads of the preset: it is given no more, and
    its key counts no less. The section ``hardware`` belongs to it where a model computes: it stands for the machine
    that it comes to. ``source_digest`` gives a digest of files outside of the store, such as source data. ``chosen``
    says which rows of tables (:mod:`rlcore.choices`) it uses; the key counts no other. ``version`` is raised when a
    result has to be made anew though no code of ours changed.

    ``registered_as``: the artifact holds a model, registered as ``<name of the preset>-<registered_as>``.
    ``render_page`` draws the stage's page. Neither is in the key: they work on the finished artifact, also one from the
    cache.

    Raises:
        ConfigError: ``run`` holds captured variables, which would be missing from the key.
    """

    name: str
    version: int
    kind: str
    run: Callable[[StageContext], StageResult]
    sections: Callable[[RunConfig], Sections]
    inputs: tuple[str, ...] = ()
    source_digest: Callable[[Sections], str] = no_files
    chosen: Callable[[Sections], Chosen] = chosen_by
    registered_as: str = ""
    render_page: Draw | None = None

    def __post_init__(self) -> None:
        function = self.run.func if isinstance(self.run, partial) else self.run
        if getattr(function, "__closure__", None):
            raise ConfigError(
                f"the function of stage {self.name!r} captures variables, which its key cannot see",
                fix="bind them with functools.partial, or read them from the configuration",
            )


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """A kind that presets name.

    ``stage`` makes the stage of a name in a preset. ``memory``: the function, as ``module:NAME``, that says what it
    needs of the device, (name, config, size of the model) to :class:`rlcore.tasks.steps.memory_need.Need`; empty where
    it trains nothing. ``checks``: the function, likewise, that says what is wrong before work, (key, its table) to
    lines; empty where nothing else can be.
    """

    stage: Callable[[str, RunConfig], Stage]
    memory: str = ""
    checks: str = ""


def kind_of(name: str) -> StageKind:
    """The kind that a preset calls ``name``."""
    found: StageKind = load(KINDS[name].partition(".settings")[0] + ".stage:KIND")
    return found


def preset_stage(name: str, config: RunConfig) -> Stage:
    """The stage ``name`` of a preset."""
    return kind_of(config.stages[name].kind).stage(name, config)


def stage_of_checkpoint(name: str) -> str:
    """The stage that makes the checkpoint ``name``."""
    return IMPORT if name == BASE else name


def stages_of_data(config: RunConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The stages that make the rows of these names: of datasets, or of stages themselves."""
    return tuple(name if name in config.stages else prepare_stage_name(name) for name in names)


def own_sections(name: str, *others: str, data: tuple[str, ...] = ()) -> Callable[[RunConfig], Sections]:
    """Declare the settings of the stage ``name``, datasets, and other sections: ``hardware`` where a model computes."""
    return partial(_own_sections, name, others, data)


def sections(*names: str) -> Callable[[RunConfig], Sections]:
    """Declare sections of a preset: ``hardware`` where a model computes."""
    return partial(_sections, names)


def _own_sections(name: str, others: tuple[str, ...], data: tuple[str, ...], config: RunConfig) -> Sections:
    return stage_sections(config, name, *others, data=data)


def _sections(names: tuple[str, ...], config: RunConfig) -> Sections:
    return sections_of(config, *names)
