"""Dependencies of stages that sample and score, outside of this code and of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RewardTerm, RlConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.stages import sampling_of, terms_of
from rlcore.tasks.steps.episodes import episodes_digest
from rlcore.tasks.steps.files import file_digest, files_of
from rlcore.tasks.store.code_hash import closure_digest


def needed_reward_models(rl: RlConfig) -> tuple[str, ...]:
    """Return the stages whose reward models a run needs: as rewards, or to start its critic from.

    Raises:
        ConfigError: as :func:`resolve_algorithm`, before any work.
    """
    in_rewards = [term.stage for term in rl.rewards if term.kind == "reward_model"]
    in_critic = resolve_algorithm(rl).uses_critic and rl.critic.init_from != "policy"
    return tuple(dict.fromkeys([*in_rewards, *([rl.critic.init_from] if in_critic else [])]))


def terms_digests(terms: Sequence[RewardTerm]) -> list[str]:
    """Return digests of the code and files of terms: custom functions with their imports, and what they read.

    Raises:
        DataError: a file cannot be read.
    """
    modules = sorted({term.module for term in terms if term.module})
    files = [file_digest(path) for term in terms for path in files_of(term)]
    return [*(closure_digest(module) for module in modules), *files]


def external_digest(config: Sections) -> str:
    """Return a digest of the external dependencies of a stage that samples and scores.

    It covers custom rewards and verifiers with their custom imports, the files that they and judges read, the search
    corpus, and the environment of the episodes.
    Raises:
        DataError: a file cannot be read.
    """
    terms, sampling = [*terms_of(config.stage).values()], sampling_of(config.stage)
    assert sampling is not None
    terms += config.declared["evaluation"].terms if "evaluation" in config.declared else []
    return " ".join(filter(None, [*terms_digests(terms), episodes_digest(sampling.episodes)]))


def evaluation_digest(config: Sections) -> str:
    """Return a digest of the external dependencies of an evaluation: of its verifiers and its episodes.

    Raises:
        DataError: a file cannot be read.
    """
    return " ".join(filter(None, [*terms_digests(config.evaluation.terms), episodes_digest(config.episodes)]))
