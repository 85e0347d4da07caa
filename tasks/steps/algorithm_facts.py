"""Facts of an algorithm that a plan needs, without an import of torch if they were found before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlcore.config import CriticConfig, KlConfig, RlConfig, SamplingConfig, UpdateConfig, to_dict
from rlcore.errors import ConfigError
from rlcore.strict_config import build
from rlcore.tasks.store.code_hash import package_digest
from rlcore.tasks.store.remembered import remembered


@dataclass(frozen=True, kw_only=True)
class AlgorithmFacts:
    """Facts of the algorithm of an RL stage.

    ``errors``: of its settings, each with its key within the stage. ``refused``: what, where and fix of the error with
    which it cannot be resolved; empty if it can. ``scale``: what divides the rewards of a group, if anything does.
    """

    errors: tuple[str, ...]
    refused: tuple[str, ...]
    uses_critic: bool
    scale: str


def algorithm_facts(rl: RlConfig) -> AlgorithmFacts:
    """Return the facts of the algorithm that these settings name."""
    found = _facts(json.dumps(to_dict(_deciding(rl))), package_digest())
    texts = {name: tuple(found[name]) for name in ("errors", "refused")}
    return AlgorithmFacts(**texts, uses_critic=found["uses_critic"], scale=found["scale"])


def uses_critic(rl: RlConfig) -> bool:
    """Return True if the algorithm of these settings trains a critic.

    Raises:
        ConfigError: as :func:`rlcore.algorithms.table.resolve_algorithm`.
    """
    facts = algorithm_facts(rl)
    if facts.refused:
        what, where, fix = facts.refused
        raise ConfigError(what, where=where, fix=fix)
    return facts.uses_critic


def _deciding(rl: RlConfig) -> RlConfig:
    """Return settings with the same facts: others than these decide on none, so they may change without a search."""
    sampling, critic = rl.sampling, rl.critic
    return RlConfig(
        algorithm=rl.algorithm,
        num_iterations=1,
        prompts_per_iteration=1,
        group_size=min(rl.group_size, 2),
        learning_rate=1.0,
        sampling=SamplingConfig(
            max_new_tokens=1,
            dynamic_sampling_rounds=min(sampling.dynamic_sampling_rounds, 1),
            zero_signal_keep_prob=0.5 if sampling.zero_signal_keep_prob < 1.0 else 1.0,
        ),
        update=UpdateConfig(num_epochs=min(rl.steps_per_iteration, 2), objective=rl.update.objective),
        kl=KlConfig(coefficient=float(rl.kl.coefficient > 0.0), apply_to=rl.kl.apply_to),
        critic=CriticConfig(gamma=critic.gamma, lam=critic.lam, gae=critic.gae),
    )


@remembered
def _facts(settings: str, code: str) -> dict[str, Any]:
    """Return :class:`AlgorithmFacts` as JSON."""
    from rlcore.algorithms.table import resolve_algorithm  # brings torch
    from rlcore.checks.settings import algorithm_errors

    rl = build(RlConfig, json.loads(settings))
    found = {"errors": list(algorithm_errors(rl)), "refused": [], "uses_critic": False, "scale": ""}
    try:
        algorithm = resolve_algorithm(rl)
    except ConfigError as error:
        return found | {"refused": [error.what, error.where, error.fix]}
    scale = getattr(algorithm.advantage, "keywords", {}).get("scale") or ""
    return found | {"uses_critic": algorithm.uses_critic, "scale": scale}
