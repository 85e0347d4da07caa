"""Dependencies of stages that sample and score, outside of this code and of their inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256

from rlcore.config import RewardTerm, RlConfig
from rlcore.errors import StorageError
from rlcore.rewards.other_interpreter import packages
from rlcore.tasks.presets.graph import sampling_of, terms_of
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.agents import agent_digests
from rlcore.tasks.steps.algorithm_facts import uses_critic
from rlcore.tasks.steps.episodes import episodes_digests
from rlcore.tasks.steps.files import by_name, file_digest, files_of
from rlcore.tasks.store.code_hash import source_digests


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
    files = [file_digest(path) for term in terms for path in files_of(term)]
    pythons = sorted({term.python for term in terms if term.python})
    installed = [(f"packages of {python}", _digest_of(python)) for python in pythons]
    return [*(pair for module, python in modules for pair in _code_of(module, python)), *installed, *files]


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
    """Return digests of the external dependencies of a stage that samples and scores, by the file's name.

    It covers custom rewards and verifiers with their custom imports, the files that they and judges read, the search
    corpus, and the environment or agent of the episodes.
    Raises:
        DataError: a file cannot be read.
    """
    terms, sampling = [*terms_of(config.stage).values()], sampling_of(config.stage)
    assert sampling is not None
    terms += config.declared["evaluation"].terms if "evaluation" in config.declared else []
    played = [*episodes_digests(sampling.episodes), *agent_digests(sampling.agent)]
    return by_name([*terms_digests(terms), *played])


def evaluation_digest(config: Sections) -> Mapping[str, str]:
    """Return digests of the external dependencies of an evaluation, its verifiers and episodes, by the file's name.

    Raises:
        DataError: a file cannot be read.
    """
    played = [*episodes_digests(config.episodes), *agent_digests(config.declared.get("agent"))]
    return by_name([*terms_digests(config.evaluation.terms), *played])
