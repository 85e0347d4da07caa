"""Rewards as a run asks for them: the grader of held-out answers, and what reward terms need beside their options."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlcore.config import EvaluationConfig, RewardTerm, RlConfig
from rlcore.models.lora import AdaptedModel, is_adapter_of, load_adapter
from rlcore.models.reward_ensemble import RewardModel, load_reward_model
from rlcore.packing import TokenSequence
from rlcore.rewards.mix import MixedReward
from rlcore.rewards.reward_model import TokenItems
from rlcore.rewards.table import RewardResources, build_rewards
from tasks.steps.base import MODEL, StageContext
from tasks.steps.runtime import Runtime


def verifier(config: EvaluationConfig, *, prefill: str) -> MixedReward:
    """The grader of held-out answers: right or wrong, whatever else the reward mixes in.

    ``prefill``: of the tokenizer whose model answers.
    """
    term = RewardTerm(kind=config.verifier, options=config.verifier_options)
    return build_rewards((term,), resources=RewardResources(prefill=prefill))


def open_reward_model(
    context: StageContext, rl: RlConfig, runtime: Runtime, policy: PreTrainedModel | AdaptedModel | None = None
) -> RewardModel | None:
    """The frozen reward model, if a reward needs it: on the policy's base where it was trained as an adapter of it."""
    if not any(term.kind == "reward_model" for term in rl.rewards):
        return None
    folder = context.inputs["reward_model"] / MODEL
    on_base = isinstance(policy, AdaptedModel) and is_adapter_of(policy, folder)
    trunk = load_adapter(policy, folder, "reward_model") if on_base else runtime.load_frozen(folder)
    return load_reward_model(trunk, folder)


def reward_resources(rl: RlConfig, model: RewardModel | None) -> RewardResources:
    """What reward terms need beside their options: here, the trained reward model as a scoring function."""
    if model is None:
        return RewardResources()

    def score(items: TokenItems, *, calibrated: bool) -> torch.Tensor:
        sequences = [TokenSequence(prompt_ids=tuple(p), completion_ids=tuple(c)) for p, c in items]
        budget = rl.update.tokens_per_microbatch
        return model.rewards(sequences, tokens_per_microbatch=budget, calibrated=calibrated)

    return RewardResources(score_tokens={"": score})
