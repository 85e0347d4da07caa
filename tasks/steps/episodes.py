"""Episodes of a run: the tools and agents of its stages, and the engine that plays them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from rlcore.config import AgentConfig, EpisodeConfig
from rlcore.errors import ConfigError, DataError
from rlcore.tasks.presets.graph import sampling_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, section_of
from rlcore.tasks.steps.files import file_digest
from rlcore.tasks.store.code_hash import source_digests


def environment_errors(config: EpisodeConfig, path: str) -> list[str]:
    """Return the errors in the environment of a section, each with its full key; ``path``: the section's."""
    if not config.environment:
        return []
    from rlcore.environments.environment import import_environment  # brings transformers

    errors = [
        f"{path}.files.{number} = {file!r}: no such file"
        for number, file in enumerate(config.files)
        if not Path(file).is_file()
    ]
    try:
        import_environment(config.environment, config.options)
    except ConfigError as error:
        errors.append(f"{path}.environment: {error.what}; {error.fix}")
    return errors


def episodes_of(config: RunConfig) -> EpisodeConfig:
    """Return the episodes in which a run's checkpoints are evaluated: those of its sampling stages, which agree."""
    found = (sampling for stage in config.stages.values() if (sampling := sampling_of(stage)))
    return next((sampling.episodes for sampling in found), EpisodeConfig())


def agent_of(config: RunConfig) -> AgentConfig | None:
    """Return the agent with which a run's checkpoints are evaluated: that of its sampling stages, which agree."""
    found = (sampling for stage in config.stages.values() if (sampling := sampling_of(stage)))
    return next((sampling.agent for sampling in found), None)


def evaluation_sections(config: RunConfig) -> Sections:
    """Select the sections of an evaluation: its settings, machine, engine, and the episodes of the RL runs."""
    evaluation, hardware = (section_of(config, name) for name in ("evaluation", "hardware"))
    engine, episodes, agent = config.engine_of(config.evaluation), episodes_of(config), agent_of(config)
    found = {"evaluation": evaluation, "hardware": hardware, "engine": engine, "episodes": episodes}
    return Sections(found | ({"agent": agent} if agent else {}))


def episodes_digests(config: EpisodeConfig) -> list[tuple[str, str]]:
    """Return names and digests of the files that episodes depend on, besides those of the library.

    These are the search corpus, the environment with its custom imports, the tool descriptions that the policy reads
    (docstrings, which no digest of code covers), and its files.
    Raises:
        DataError: a file cannot be read.
        ConfigError: the environment cannot be imported.
    """
    corpus = [_corpus_digest(config.search_corpus)] if config.search_corpus else []
    if not config.environment:
        return corpus
    from rlcore.environments.environment import import_environment

    schemas = import_environment(config.environment, config.options).schemas
    read = (f"tool descriptions of {config.environment}", sha256(json.dumps(schemas).encode()).hexdigest())
    return [*corpus, *source_digests(config.module), read, *map(file_digest, config.files)]


def _corpus_digest(path: str) -> tuple[str, str]:
    try:
        return file_digest(path)
    except DataError as error:
        raise DataError(error.what, where=path, fix="set sampling.episodes.search_corpus") from error
