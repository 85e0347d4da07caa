"""GRPO, PPO and SFT of a micro model on the device, in each precision and without a pipeline: they learn the rule.

The rule is the plainest that a reward can state, one token is worth 1, so whether it is learned depends on no draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import SftConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import merged_state
from rlcore.models.scratch import make_tokenizer
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.experience import build_experience
from rlcore.training.learner import Learner
from rlcore.training.scoring_models import ScoringModels
from rlcore.training.sft import SftLearner, run_sft_steps
from rlcore.types import Prompt, Rollout, Score, ScoredRollout
from tests.gpu import micro

GOOD = 70  # the token that is worth something
TOKENS, GROUP = 8, 16
PROMPTS = [
    Prompt(prompt_id=str(n), messages=(), token_ids=(20 + n, 30 + n, 40), reference="", task="rule") for n in range(4)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = make_tokenizer(max_positions=128)
    backend.save_pretrained(folder)
    GenerationConfig(eos_token_id=[backend.eos_token_id], pad_token_id=backend.pad_token_id).save_pretrained(folder)
    return ChatTokenizer.load(folder)


def scored(groups: list[list[Any]]) -> list[list[ScoredRollout]]:
    made = []
    for group in groups:
        kept = [item for item in group if isinstance(item, Rollout)]
        values = [item.completion_ids.count(GOOD) / TOKENS for item in kept]
        made.append(
            [ScoredRollout(rollout=r, score=Score(value=v, terms={})) for r, v in zip(kept, values, strict=True)]
        )
    return made


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rl_learns_what_is_rewarded(
    algorithm: str, device: torch.device, dtype: torch.dtype, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("a CPU multiplies float16 slowly; the pieces are tried in it, and SFT")
    start = micro.make(LlamaConfig, eos_token_id=tokenizer.eos_ids[0])
    policy = micro.placed(start, device, dtype)
    critic = ScalarHeadModel.on_backbone(micro.placed(start, device, dtype)) if algorithm == "ppo" else None
    config = micro.rl_config(algorithm, num_iterations=12, learning_rate=2e-2)
    learner = Learner(policy, critic, algorithm=ALGORITHMS[algorithm], config=config)
    sampler = NativeSampler(micro.placed(start, device).to(dtype), tokenizer)
    judges = ScoringModels(policy=policy, reference=None, critic=critic, temperature=1.0, tokens_per_microbatch=512)
    params = SamplingParams(temperature=1.0, max_new_tokens=TOKENS, num_samples=GROUP)
    rewards, stats = [], None
    for iteration in range(12):
        groups = scored(sampler.sample(PROMPTS, params, seed=iteration))
        rewards.append(sum(item.score.value or 0.0 for group in groups for item in group) / (GROUP * len(PROMPTS)))
        experience = build_experience(
            groups,
            learner.algorithm,
            judges,
            kl=config.kl,
            kl_coefficient=0.0,
            truncated="score",
            need_old_logprobs=learner.config.update.needs_old_logprobs,
        )
        stats = learner.update(experience.samples, seed=iteration)
        if iteration == 0:  # the first step begins at a ratio of 1
            assert stats.metrics["clip/fraction"] == 0.0
        sampler.load_weights(merged_state(learner.policy), policy_version=learner.policy_version)
    assert rewards[0] < 0.05  # one token of 262
    assert rewards[-1] > 0.3
    assert stats is not None and stats.policy_version == 12


def test_sft_learns_its_demonstrations(device: torch.device, dtype: torch.dtype) -> None:
    rows = [TokenSequence(prompt_ids=(2 + n, 3), completion_ids=(GOOD, 2 + n, 1)) for n in range(16)]
    demonstrations = [Demonstration(sequence=row, loss_mask=(True,) * 3) for row in rows]
    model = micro.placed(micro.make(LlamaConfig), device, dtype)
    config = SftConfig(num_steps=40, batch_size=16, learning_rate=1e-2, tokens_per_microbatch=64)
    losses: list[float] = []
    run_sft_steps(
        SftLearner(model, config),
        demonstrations,
        demonstrations,
        config,
        seed=0,
        report=lambda _, metrics: losses.append(metrics["sft/loss"]),
    )
    assert losses[0] > 5.0  # ln 262 is 5.57
    assert losses[-1] < 0.5
