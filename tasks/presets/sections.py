"""Sections of a preset that a stage has selected.

The cache key covers exactly what a stage receives, except for engines, which count by the numbers that they compute.
Their machines, replicas and weight transfer change no result, so a run that resumes elsewhere finds its results. Files
of data and models count by their names; a digest covers their content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.config import (
    AgentConfig,
    DistributedConfig,
    EngineConfig,
    EpisodeConfig,
    ModelConfig,
    RewardTerm,
    player_of,
    to_dict,
)
from rlcore.rewards.base import VERIFIERS
from rlcore.tasks.presets.data import HUB, DatasetConfig
from rlcore.tasks.presets.graph import (
    Graders,
    curriculum_of,
    evaluated_data,
    is_stage,
    reward_models_of,
    sampling_of,
    terms_of,
)
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.store.code_hash import Chosen
from rlcore.tasks.store.storage import flatten


@dataclass(frozen=True)
class Sections:
    """Sections that a stage has selected, by name; any other is an ``AttributeError``."""

    declared: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name != "declared" and name in self.declared:
            return self.declared[name]
        raise AttributeError(
            f"the stage has not declared the section {name!r}, so its key does not count it; declare it in its Stage"
        )

    def for_key(self) -> dict[str, Any]:
        """Return the part of each section that belongs to a cache key, as JSON values."""
        return {name: _counted(value) for name, value in self.declared.items()}

    def files(self) -> dict[str, str]:
        """Return the files that the sections name, by their keys: a cache key covers their names alone."""
        return {key: path for name, section in self.declared.items() for key, path in _files(name, section)}


def sampling_parts(config: Sections) -> tuple[EpisodeConfig | None, AgentConfig | None, EngineConfig | None]:
    """Return episodes, agent and engine of sections: those of a stage that samples, else those of an evaluation."""
    stage, names = config.declared.get("stage"), ("episodes", "agent", "engine")
    if stage and (sampling := sampling_of(stage)):
        return sampling.episodes, sampling.agent, sampling.engine
    episodes, agent, engine = (config.declared.get(name) for name in names)
    return episodes, agent, engine


def sections_of(config: RunConfig, names: Iterable[str]) -> Sections:
    """Return the named sections of a preset; an evaluation comes without its engine, see :func:`section_of`."""
    return Sections({name: section_of(config, name) for name in names})


def stage_sections(config: RunConfig, stage: str, *, names: Iterable[str] = (), data: Iterable[str] = ()) -> Sections:
    """Return the settings of a stage as ``stage``, with its engine, ``data`` sets, and other sections.

    The rows of its data sets count by their digests, whatever number is requested.
    """
    found = {name: section_of(config, name) for name in names} | {"stage": _with_engine(config, stage)}
    return Sections(
        found | ({"data": {name: replace(config.data[name], num_train=1, num_eval=1) for name in data}} if data else {})
    )


def data_sections(config: RunConfig, *, name: str, names: Iterable[str] = ()) -> Sections:
    """Return a dataset as ``data``, a table of it alone, and the named sections."""
    data = config.data[name]
    data = replace(data, system_prompt=data.system_prompt or config.model.system_prompt)
    return Sections({"data": {name: data}, **{each: section_of(config, each) for each in names}})


def section_of(config: RunConfig, name: str) -> Any:
    """Return the section ``name``.

    An evaluation names its datasets, and comes without its engine: only stages that evaluate select ``engine``, so that
    no others depend on it. ``confidence`` is the level of all intervals, for stages that need no other setting of it.
    """
    if name == "evaluation":
        return replace(config.evaluation, engine=None, data=evaluated_data(config))
    return config.evaluation.confidence if name == "confidence" else getattr(config, name)


def _with_engine(config: RunConfig, name: str) -> Any:
    stage: Any = config.stages[name]
    sampling = sampling_of(stage)
    if sampling is None:
        return stage
    named = replace(sampling, engine=config.engine_of(sampling))
    return replace(stage, settings=replace(stage.settings, sampling=named))


def _files(name: str, section: Any) -> Iterator[tuple[str, str]]:
    if isinstance(section, Mapping):
        for each, inner in section.items():
            yield from _files(f"{name}.{each}", inner)
    elif isinstance(section, DatasetConfig | ModelConfig):
        yield from ((f"{name}.{key}", str(Path(path).absolute())) for key, path in section.files.items())
    elif is_stage(section) and (sampling := sampling_of(section)) and sampling.agent:
        for key in ("files", "sandbox_read"):
            paths = enumerate(getattr(sampling.agent, key))
            yield from ((f"{name}.sampling.agent.{key}.{at}", str(Path(path).absolute())) for at, path in paths)


def _counted(section: Any) -> Any:
    if isinstance(section, Mapping):
        return {name: _counted(each) for name, each in sorted(section.items())}
    if isinstance(section, AgentConfig | DatasetConfig | ModelConfig):
        return to_dict(section.without_folders)
    if isinstance(section, EngineConfig | DistributedConfig):
        return to_dict(section.numbers)
    if isinstance(section, EvaluationConfig):
        return {key: value for key, value in to_dict(section).items() if key != "engine"}
    values = to_dict(section)
    if is_stage(section) and (sampling := sampling_of(section)):
        agent = {"agent": _counted(sampling.agent)} if sampling.agent else {}
        return {**values, "sampling": {**values["sampling"], "engine": _counted(sampling.engine), **agent}}
    return values


_MATH = Graders(kinds=("math",))


def chosen_by(config: Sections, *, graders: Graders = _MATH) -> Chosen:
    """Return the rows that the sections of a stage choose.

    ``graders``: those of a dataset, which try its reference answers.
    """
    stage, evaluation = config.declared.get("stage"), config.declared.get("evaluation")
    terms: list[RewardTerm] = list(terms_of(stage).values()) if stage else []
    terms += [each.term for each in evaluation.verifiers] if evaluation else []
    kinds = {"function" if ":" in term.kind else term.kind for term in terms}
    kinds |= {"reward_model"} if stage and reward_models_of(stage) else set()
    episodes, agent, engine = sampling_parts(config)
    episodes, placement = episodes or EpisodeConfig(), config.declared.get("distributed")
    data = () if stage else _datasets(config)
    screens = {"none", *("tests" for each in data if each.contract == "code_tasks")}
    if data and graders.compare:
        kinds, screens = kinds | ({*graders.kinds} & {*VERIFIERS}), screens | {"references"}
    return {
        "rewards.kind": frozenset(kinds),
        "episodes": frozenset({player_of(episodes, agent)}),
        "episodes.tools": frozenset(episodes.tools),
        "engine.kind": frozenset({engine.kind} if engine else ()),
        "distributed.backend": frozenset({placement.backend if placement else "local"}),
        "data.screen": frozenset(screens),
        "draw": frozenset({"by_pass_rate"} if stage and curriculum_of(stage) else ()),
    }


def idle_packages(config: Sections) -> frozenset[str]:
    """Return the packages that the code of a stage imports but does not use with these sections."""
    stage, model = config.declared.get("stage"), config.declared.get("model")
    settings = flatten(to_dict(stage.settings)) if stage else {}
    adapts = any(value for key, value in settings.items() if f".{key}".endswith(".lora.rank"))
    eight_bits = any(value == "adamw_8bit" for key, value in settings.items() if f".{key}".endswith("optim.kind"))
    data = () if stage else _datasets(config)
    made = any("reasoning_gym" in (each.adapter, each.fallback) for each in data)
    made |= "procedural" in chosen_by(config)["rewards.kind"]  # sampled pairs are graded
    fetched = any(path.startswith(HUB) for each in data for path in (each.path, each.eval_path))
    used = {
        "peft": adapts,
        "bitsandbytes": eight_bits,
        "accelerate": model is None or model.source in ("gguf", "package"),
        "gguf": model is None or model.source in ("gguf", "package"),
        "reasoning_gym": not data or made,
        "datasets": not data or fetched,
    }
    return frozenset(name for name, is_used in used.items() if not is_used)


def _datasets(config: Sections) -> tuple[DatasetConfig, ...]:
    found = config.declared.get("data")
    return tuple(found.values()) if isinstance(found, Mapping) else ()
