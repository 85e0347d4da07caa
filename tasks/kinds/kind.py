"""Stages and stage kinds of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.hardware.memory_plan import ModelSize
from rlcore.tasks.drawing.result import Draw
from rlcore.tasks.kinds import BASE, StageConfig, load, table_name
from rlcore.tasks.presets.graph import start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, chosen_by, sections_of, stage_sections
from rlcore.tasks.steps.base import StageContext, StageResult, prepare_stage_name
from rlcore.tasks.steps.memory_need import Device, Need
from rlcore.tasks.store.code_hash import Chosen

IMPORT = "import_sft"
History = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Lazy:
    """A function that ``module:NAME`` names, imported by its first call: a plan needs the names of steps alone."""

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "__module__", self.name.partition(":")[0])  # as functions have it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load(self.name)(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Use of earlier work of a stage that trains.

    ``length``: the key of its number of steps in the stage's table. ``bound`` returns the reason why work of another
    length is not continued, or an empty text.

    ``stop`` returns the stop of a run with this history by a rule of the sections, as JSON, or None; ``recorded``
    returns the history and the stop in an artifact.
    """

    length: str
    bound: Callable[[Any], str]
    stop: Callable[[History, Sections], Mapping[str, Any] | None] = lambda history, config: None
    recorded: Callable[[Path], tuple[History, Mapping[str, Any] | None]] = lambda folder: ((), None)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Pipeline stage, and everything that its cache key covers.

    ``artifact``: the kind of its artifact, after which the store names the folder. ``inputs`` names upstream stages.
    ``sections`` selects the preset sections that the step may read; the key covers exactly these. ``hardware`` among
    them means that a model computes, and is replaced by the detected machine. ``source_digest`` returns a digest of
    external files, such as source data, or one by name. ``chosen`` returns the rows of tables (:mod:`rlcore.choices`)
    that the stage uses; the key covers no others. Increase ``version`` to invalidate results although no code changed.

    ``observers``: sections, and keys of sections, that no weight and no row depends on, and ``observed`` the inputs. An
    earlier result serves others. ``trains_on``: inputs of whose rows only those for training count. ``continuation``:
    use of earlier work of other lengths; None: an equal key alone counts.

    ``registered_as``: the artifact holds a model, registered as ``<name of the preset>-<registered_as>``.
    ``render_page`` renders the stage's page. Neither is in the key: both use the finished artifact, cached or not.
    Raises:
        ConfigError: ``run`` captures variables, which the key cannot cover.
    """

    name: str
    artifact: str
    run: Callable[[StageContext], StageResult]
    sections: Callable[[RunConfig], Sections]
    version: int = 1
    inputs: tuple[str, ...] = ()
    source_digest: Callable[[Sections], str | Mapping[str, str]] = lambda config: ""
    chosen: Callable[[Sections], Chosen] = chosen_by
    observers: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    trains_on: tuple[str, ...] = ()
    continuation: Continuation | None = None
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
    """Stage kind that presets name.

    ``stage`` builds the stage of a name in a preset. ``memory`` returns the memory that it needs; None if it trains
    nothing. ``checks`` returns errors before a run of the stage with a key such as ``stages.NAME`` and its table.
    """

    stage: Callable[[str, RunConfig], Stage]
    memory: Callable[[str, RunConfig, ModelSize, Device], Need] | None = None
    checks: Callable[[str, Any], Iterable[str]] = lambda key, table: ()


def kind_of(name: str) -> StageKind:
    """Return the kind that a preset calls ``name``."""
    found: StageKind = load(table_name(name).partition(":")[0] + ":KIND")
    return found


def preset_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage ``name`` of a preset."""
    return kind_of(config.stages[name].kind).stage(name, config)


def stage_of_checkpoint(name: str) -> str:
    """Return the stage that makes the checkpoint ``name``."""
    return IMPORT if name == BASE else name


def stage_of_start(name: str, own: StageConfig) -> str:
    """Return the stage that makes the checkpoint from which the stage ``name`` with the table ``own`` starts."""
    return stage_of_checkpoint(start_of(name, own))


def stages_of_data(config: RunConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the stages that make the rows of these names, which are datasets or stages."""
    return tuple(name if name in config.stages else prepare_stage_name(name) for name in names)


def from_the_start(length: str) -> Continuation:
    """Return the use of earlier work of a stage that keeps no optimizer states, and so always trains from its start."""
    return Continuation(
        length=length, bound=lambda stage: f"the kind {stage.kind!r} keeps no checkpoint to continue from"
    )


def own_sections(name: str, *others: str, data: tuple[str, ...] = ()) -> Callable[[RunConfig], Sections]:
    """Select the settings of the stage ``name``, datasets, and others, with ``hardware`` if a model computes."""
    return partial(stage_sections, stage=name, names=others, data=data)


def sections(*names: str) -> Callable[[RunConfig], Sections]:
    """Select sections of a preset, including ``hardware`` if a model computes."""
    return partial(sections_of, names=names)
