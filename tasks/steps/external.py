"""Dependencies of stages that sample and score, outside of this code and of their inputs."""

from __future__ import annotations

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig
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


def external_digest(config: Sections) -> str:
    """Return a digest of the external dependencies of a stage that samples and scores.

    It covers custom rewards with their custom imports, the files that rewards and judges read, the search corpus, and
    the environment of the episodes.
    Raises:
        DataError: a file cannot be read.
    """
    terms, sampling = tuple(terms_of(config.stage).values()), sampling_of(config.stage)
    assert sampling is not None
    modules = sorted({term.module for term in terms if term.module})
    files = [file_digest(path) for term in terms for path in files_of(term)]
    digests = [*(closure_digest(module) for module in modules), *files, episodes_digest(sampling.episodes)]
    return " ".join(filter(None, digests))
