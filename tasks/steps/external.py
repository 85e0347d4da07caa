"""Dependencies of stages that sample and score, outside of this code and of their inputs: their digests and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from rlcore.agents.program import files_below, open_program
from rlcore.config import AgentConfig, EpisodeConfig, RewardTerm, RlConfig
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.rewards.other_interpreter import packages
from rlcore.tasks.presets.graph import sampling_of, terms_of
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.presets.sections import Sections, sampling_parts, section_of
from rlcore.tasks.steps.algorithm_facts import uses_critic
from rlcore.tasks.steps.data_source import by_name
from rlcore.tasks.store.code_hash import source_digests
from rlcore.tasks.store.storage import file_sha256


def needed_reward_models(rl: RlConfig) -> tuple[str, ...]:
    """Return the stages whose reward models a run needs: as rewards, or to start its critic from.

    Raises:
        ConfigError: as :func:`rlcore.algorithms.table.resolve_algorithm`, before any work.
    """
    in_rewards = [term.stage for term in rl.rewards if term.kind == "reward_model"]
    in_critic = uses_critic(rl) and rl.critic.init_from != "policy"
    return tuple(dict.fromkeys([*in_rewards, *([rl.critic.init_from] if in_critic else [])]))


def terms_digests(terms: Sequence[RewardTerm]) -> list[tuple[str, str]]:
    """Return names and digests of the code and files of terms: functions with their imports, and what they read.

    Raises:
        DataError: a file cannot be read.
        ConfigError: an interpreter does not start.
    """
    modules = sorted({(term.module, term.python) for term in terms if term.module})
    read = [path for term in terms for path in term.files]
    read += [str(term.options["template"]) for term in terms if term.kind == "judge" and term.options.get("template")]
    pythons = sorted({term.python for term in terms if term.python})
    installed = [(f"packages of {python}", _digest_of(python)) for python in pythons]
    return [
        *(pair for module, python in modules for pair in _code_of(module, python)),
        *installed,
        *map(_file_digest, read),
    ]


def _code_of(module: str, python: str) -> list[tuple[str, str]]:
    """Return the files and digests of a custom module; none if only another interpreter has it, as a package."""
    try:
        return source_digests(module)
    except StorageError:
        if not python:
            raise
        return []


def _digest_of(python: str) -> str:
    found = packages(python, "a reward")
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def external_digest(config: Sections) -> Mapping[str, str]:
    """Return digests of the external dependencies of a stage that samples, scores or evaluates, by the file's name.

    It covers custom rewards and verifiers with their custom imports, the files that they and judges read, the search
    corpus, and the environment or agent of the episodes.
    Raises:
        DataError: a file cannot be read.
    """
    stage, evaluation = (config.declared.get(name) for name in ("stage", "evaluation"))
    terms = [*(terms_of(stage).values() if stage else ()), *(evaluation.terms if evaluation else ())]
    episodes, agent, _ = sampling_parts(config)
    return by_name([*terms_digests(terms), *episodes_digests(episodes or EpisodeConfig()), *agent_digests(agent)])


def agent_errors(agent: AgentConfig, path: str) -> Iterator[str]:
    """Yield the errors in the agent of a section, each with its full key; ``path``: the section's."""
    for key, files in (("files", agent.files), ("sandbox_read", agent.sandbox_read)):
        for number, file in enumerate(files):
            if not Path(file).exists():
                yield f"{path}.{key}.{number} = {file!r}: no such file"
    yield from _command_errors(agent, path)
    if sys.platform != "linux":
        yield f"{path}: processes of agents are ended by means of Linux; run it on Linux"
        return
    with ExitStack() as stack:
        yield from collect_error(f"{path}.sandbox", lambda: stack.enter_context(open_program(agent)))


def agent_digests(agent: AgentConfig | None) -> list[tuple[str, str]]:
    """Return names and digests of the files that an agent consists of.

    Raises:
        DataError: a file cannot be read.
    """
    if agent is None:
        return []
    named = [word for word in agent.command if Path(word).is_absolute() and Path(word).is_file()]
    return [pair for file in (*agent.files, *named) for pair in _digests(Path(file))]


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    for each in files_below(path):
        is_link = each.is_symlink() and each != path
        name = str(Path(path.name, each.relative_to(path)))
        yield name, f"link to {each.readlink()}" if is_link else _file_digest(str(each))[1]


def _command_errors(agent: AgentConfig, path: str) -> Iterator[str]:
    program, copied = agent.command[0], {Path(file).name: Path(file) for file in agent.files}
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    is_relative = "/" in program and not Path(program).is_absolute()
    inside = _source(program, copied) if is_relative else None
    if inside and not os.access(inside, os.X_OK):
        yield f"{path}.command = {program!r}: {inside} is not executable; chmod +x, or name its interpreter first"
    elif not inside and (is_relative or shutil.which(program, path=agent.env.get("PATH", search)) is None):
        yield (
            f"{path}.command = {program!r}: no such program; install it, or add its file to files and write "
            f"./{Path(program).name}"
        )
    for word in (each for each in agent.command if not Path(each).is_absolute()):
        name = Path(word).name
        is_path = re.fullmatch(r"[\w.][\w./-]*", word)  # no command of a shell, and no option
        if is_path and name in copied and _source(word, copied) is None:
            yield f"{path}.command: {word!r} is copied to the agent's own folder without folders; write {name}"
        elif _source(word, copied) is None and word != program and Path(word).is_file():
            yield f"{path}.command: {word!r} is a file here, and agents run in a folder of their own; add it to files"


def _source(word: str, copied: Mapping[str, Path]) -> Path | None:
    first, *rest = Path(word).parts or ("",)
    return Path(copied[first], *rest) if first in copied else None


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


def evaluation_sections(config: RunConfig) -> Sections:
    """Select the sections of an evaluation: its settings, machine, engine, and the episodes of its sampling stages."""
    sampling = next(filter(None, map(sampling_of, config.stages.values())), None)
    found = {name: section_of(config, name) for name in ("evaluation", "hardware")}
    found |= {"engine": config.engine_of(config.evaluation)}
    found |= {"episodes": sampling.episodes if sampling else EpisodeConfig()}
    return Sections(found | ({"agent": sampling.agent} if sampling and sampling.agent else {}))


def episodes_digests(config: EpisodeConfig) -> list[tuple[str, str]]:
    """Return names and digests of the files that episodes depend on, besides those of the library.

    They include tool descriptions: docstrings, which no digest of code covers.
    Raises:
        DataError: a file cannot be read.
        ConfigError: the environment cannot be imported.
    """
    fix = "set sampling.episodes.search_corpus"
    corpus = [_file_digest(config.search_corpus, fix=fix)] if config.search_corpus else []
    if not config.environment:
        return corpus
    from rlcore.environments.environment import import_environment

    schemas = import_environment(config.environment, config.options).schemas
    read = (f"tool descriptions of {config.environment}", sha256(json.dumps(schemas).encode()).hexdigest())
    return [*corpus, *source_digests(config.module), read, *map(_file_digest, config.files)]


def _file_digest(path: str, *, fix: str = "") -> tuple[str, str]:
    try:
        return Path(path).name, file_sha256(Path(path))
    except OSError as error:
        raise DataError(f"cannot read a file that the preset names: {error.strerror}", where=path, fix=fix) from error
