"""Sections of a configuration as the keys of stages take them: an engine counts by the numbers that it gives.

Where an engine runs, how many servers share its work and how weights reach them change no result: a run that goes on
another machine finds what it computed.
"""

from __future__ import annotations

from typing import Any

from rlcore.config import EvaluationConfig, RejectionConfig, RlConfig, RunConfig, to_dict


def section_of(config: RunConfig, name: str) -> Any:
    """The section ``name``; of an evaluation without its engine, which only the stages that evaluate depend on."""
    section = getattr(config, name)
    if name == "engine":
        return section.numbers
    if isinstance(section, EvaluationConfig):
        return {key: value for key, value in to_dict(section).items() if key != "engine"}
    if isinstance(section, RlConfig | RejectionConfig):
        values = to_dict(section)
        return {**values, "sampling": {**values["sampling"], "engine": config.engine_of(section.sampling).numbers}}
    return section
