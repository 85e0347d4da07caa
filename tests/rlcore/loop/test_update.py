from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import KlConfig
from rlcore.loop.update import mean_kl
from rlcore.training.experience import build_experience
from rlcore.training.scoring_models import ScoringModels
from tests import strategies


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_adaptive_coefficient_sees_nats_per_completion_wherever_the_kl_stands(placement: Any) -> None:
    policy, reference = strategies.tiny_llama(), strategies.tiny_llama(seed=9)
    groups = strategies.random_groups(policy, 3)
    kl = KlConfig(coefficient=0.1, apply_to=placement)
    judges = ScoringModels(policy=policy, reference=reference, critic=None, temperature=1.0, tokens_per_microbatch=64)
    experience = build_experience(
        groups, ALGORITHMS["grpo"], judges, kl=kl, kl_coefficient=0.1, truncated="score", need_old_logprobs=False
    )
    items = [item.rollout for group in groups for item in group]
    gaps = []
    for sample, rollout in zip(experience.samples, items, strict=True):
        old = rollout.sampler_logprobs  # the engine's are the policy's own here
        gaps.append([a - float(b) for a, b in zip(old, sample.ref_logprobs, strict=True)])
    if placement == "reward":
        expected = sum(map(sum, gaps)) / len(gaps)
        assert mean_kl(experience, {}) == pytest.approx(expected, rel=1e-4)
        return
    k3 = [math.exp(-gap) + gap - 1.0 for row in gaps for gap in row]
    per_token = sum(k3) / len(k3)
    assert mean_kl(experience, {"kl/ref": per_token}) == pytest.approx(sum(k3) / len(gaps), rel=1e-6)
    assert mean_kl(dataclasses.replace(experience), {}) == 0.0
