"""What a stage is given of a preset: the sections that it has declared, and no other.

What a stage is given is also what its key counts, but for an engine: that counts by the numbers that it gives. Where
an engine runs, how many servers share its work and how weights reach them change no result, so a run that goes on
another machine finds what it computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config import EngineConfig, EvaluationConfig, RejectionConfig, RlConfig, RunConfig, to_dict


@dataclass(frozen=True)
class Sections:
    """The sections of a preset that a stage has declared, by name; any other is an ``AttributeError``."""

    declared: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name != "declared" and name in self.declared:
            return self.declared[name]
        raise AttributeError(
            f"the stage has not declared the section {name!r}, so its key does not count it; declare it in its Stage"
        )

    def counted(self) -> dict[str, Any]:
        """What a key counts of each section, as JSON values."""
        return {name: _counted(value) for name, value in self.declared.items()}


def sections_of(config: RunConfig, *names: str) -> Sections:
    """The named sections of a preset; one that samples names the engine that it samples with."""
    return Sections({name: section_of(config, name) for name in names})


def section_of(config: RunConfig, name: str) -> Any:
    """The section ``name``, whole: with its engine where it samples.

    An evaluation comes without one: the stages that evaluate declare ``engine`` beside it, and no others depend on it.
    ``confidence`` is that of every interval, for stages that need no more of the evaluation.
    """
    section = config.evaluation.confidence if name == "confidence" else getattr(config, name)
    if isinstance(section, EvaluationConfig):
        return replace(section, engine=None)
    if isinstance(section, RlConfig | RejectionConfig):
        return replace(section, sampling=replace(section.sampling, engine=config.engine_of(section.sampling)))
    return section


def _counted(section: Any) -> Any:
    if isinstance(section, EngineConfig):
        return to_dict(section.numbers)
    if isinstance(section, EvaluationConfig):
        return {key: value for key, value in to_dict(section).items() if key != "engine"}
    if isinstance(section, RlConfig | RejectionConfig):
        values, engine = to_dict(section), section.sampling.engine
        return {**values, "sampling": {**values["sampling"], "engine": _counted(engine)}}
    return to_dict(section)
