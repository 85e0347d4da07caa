"""Rewards of a run: the grader of held-out answers, and resources of reward terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from rlcore.choices import choices
from rlcore.config import RewardTerm
from rlcore.models.lora import AdaptedModel, is_adapter_of, load_adapter
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.mix import WeightedReward
from rlcore.rewards.reward_model import token_scorer
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.steps.base import MODEL, StageContext

if TYPE_CHECKING:
    from rlcore.models.reward_ensemble import RewardModel


def verifier(context: StageContext, runtime: Runtime, *, prefill: str) -> WeightedReward:
    """Open the grader of held-out answers, independent of the training reward.

    ``prefill``: of the tokenizer whose model answers.
    """
    config: EvaluationConfig = context.config.evaluation
    models = open_reward_models(context.inputs, config.terms, runtime)
    resources = reward_resources(models, tokens_per_microbatch=config.tokens_per_microbatch, prefill=prefill)
    return build_rewards(config.terms, resources=resources)


def open_reward_models(
    inputs: Mapping[str, Path],
    terms: Sequence[RewardTerm],
    runtime: Runtime,
    policy: PreTrainedModel | AdaptedModel | None = None,
) -> dict[str, RewardModel]:
    """Open the frozen reward models of terms, by stage: on the policy's base if they are LoRAs on it."""
    folders = reward_model_folders(inputs, terms)
    return {name: MODELS["reward_model"](folder, name, runtime, policy) for name, folder in folders.items()}


def reward_model_folders(inputs: Mapping[str, Path], terms: Sequence[RewardTerm]) -> dict[str, Path]:
    """Return the checkpoints of the reward models of terms, by stage."""
    names = dict.fromkeys(term.stage for term in terms if term.kind == "reward_model")
    return {name: inputs[name] / MODEL for name in names}


def _open_reward_model(
    folder: Path, name: str, runtime: Runtime, policy: PreTrainedModel | AdaptedModel | None
) -> RewardModel:
    on_base = isinstance(policy, AdaptedModel) and is_adapter_of(policy, folder)
    backbone = load_adapter(policy, folder, name) if on_base else runtime.load_frozen(folder)
    return load_reward_model(backbone, folder)


MODELS = choices("rewards.kind", {"reward_model": _open_reward_model})
SCORERS = choices("rewards.kind", {"reward_model": token_scorer})


def reward_resources(models: Mapping[str, RewardModel], *, tokens_per_microbatch: int, prefill: str) -> RewardResources:
    """Return resources of reward terms besides options: the trained reward models as scoring functions."""
    score = {name: SCORERS["reward_model"](model, tokens_per_microbatch) for name, model in models.items()}
    return RewardResources(score_tokens=score, prefill=prefill)
