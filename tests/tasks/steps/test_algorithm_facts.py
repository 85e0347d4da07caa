"""Facts of an algorithm are those of the algorithm itself, whatever else the settings are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.algorithms.table import ALGORITHMS
from rlcore.checks.settings import algorithm_errors
from rlcore.config import KlConfig, ObjectiveConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.errors import ConfigError
from rlcore.tasks.steps.algorithm_facts import algorithm_facts, uses_critic

BASE = RlConfig(
    algorithm="grpo",
    num_iterations=50,
    prompts_per_iteration=12,
    group_size=6,
    learning_rate=3e-6,
    sampling=SamplingConfig(max_new_tokens=300),
)
VARIANTS = {
    "plain": BASE,
    "alone": replace(BASE, group_size=1),
    "with KL": replace(BASE, kl=KlConfig(coefficient=0.03)),
    "with KL in the reward": replace(BASE, kl=KlConfig(coefficient=0.03, apply_to="reward")),
    "with rounds": replace(BASE, sampling=SamplingConfig(max_new_tokens=9, dynamic_sampling_rounds=4)),
    "skipping": replace(BASE, sampling=SamplingConfig(max_new_tokens=9, zero_signal_keep_prob=0.2)),
    "scaled": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(scale="batch"))),
    "clipped": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(clip_low=0.1))),
    "constant": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(weighting="constant"))),
    "penalized": replace(BASE, update=UpdateConfig(num_epochs=2, objective=ObjectiveConfig(penalty_target=0.1))),
    "gated": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(gate_positive=2.0))),
}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "grop"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_they_are_those_of_the_resolved_algorithm(algorithm: str, variant: RlConfig) -> None:
    rl = replace(variant, algorithm=algorithm)
    facts = algorithm_facts(rl)
    assert list(facts.errors) == list(algorithm_errors(rl))
    try:
        resolved = resolve_algorithm(rl)
    except ConfigError as error:
        with pytest.raises(ConfigError) as caught:
            uses_critic(rl)
        assert str(caught.value) == str(error)
    else:
        assert uses_critic(rl) == resolved.uses_critic
        assert facts.scale == (getattr(resolved.advantage, "keywords", {}).get("scale") or "")
