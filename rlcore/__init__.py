"""Online RL for language models, as a library. Ten iterations of GRPO from a checkpoint, with a custom reward:

    from pathlib import Path

    import rlcore

    START = Path("model")  # config.json, safetensors, and a tokenizer with a chat template


    def reward_of(rollouts):  # 1 for a right answer, 0.1 for a wrong one with a digit
        right = [rollout.text.strip() == rollout.prompt.reference for rollout in rollouts]
        digits = [any(map(str.isdigit, rollout.text)) for rollout in rollouts]
        return [max(float(r), 0.1 * d) for r, d in zip(right, digits, strict=True)]


    config = rlcore.RlConfig(
        algorithm="grpo",
        num_iterations=10,
        prompts_per_iteration=4,
        group_size=4,
        learning_rate=1e-5,
        rewards=(),  # terms by name, for build_rewards; here a function rewards
        sampling=rlcore.SamplingConfig(max_new_tokens=8),
    )
    questions = {f"{a} + {b} = ?": str(a + b) for a in range(10) for b in range(10)}
    prompts = rlcore.chat_prompts(rlcore.ChatTokenizer.load(START), questions)
    reward = rlcore.function_reward(reward_of)
    components = rlcore.native_components(START, config, prompts=prompts, reward=reward, folder=Path("run"))
    result = rlcore.train(components)
    components.learner.save_model(START, Path("trained"))

Names are imported on first access, so ``import rlcore`` imports neither torch nor transformers. docs/library.md
documents the interface.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config import CheckpointConfig as CheckpointConfig
    from rlcore.config import CriticConfig as CriticConfig
    from rlcore.config import HealthConfig as HealthConfig
    from rlcore.config import KlConfig as KlConfig
    from rlcore.config import LimitConfig as LimitConfig
    from rlcore.config import ModelConfig as ModelConfig
    from rlcore.config import ObjectiveConfig as ObjectiveConfig
    from rlcore.config import OptimConfig as OptimConfig
    from rlcore.config import RewardTerm as RewardTerm
    from rlcore.config import RlConfig as RlConfig
    from rlcore.config import SamplingConfig as SamplingConfig
    from rlcore.config import ShapeConfig as ShapeConfig
    from rlcore.config import UpdateConfig as UpdateConfig
    from rlcore.errors import RlcoreError as RlcoreError
    from rlcore.loop import Components as Components
    from rlcore.loop import HealthStop as HealthStop
    from rlcore.loop import HeldOut as HeldOut
    from rlcore.loop import LogRecorder as LogRecorder
    from rlcore.loop import Recorder as Recorder
    from rlcore.loop import Run as Run
    from rlcore.loop import TrainResult as TrainResult
    from rlcore.loop import finish as finish
    from rlcore.loop import iterate as iterate
    from rlcore.loop import open_run as open_run
    from rlcore.loop import train as train
    from rlcore.loop.curves import CurveRecorder as CurveRecorder
    from rlcore.loop.curves import TensorBoard as TensorBoard
    from rlcore.loop.curves import Trackio as Trackio
    from rlcore.loop.curves import Wandb as Wandb
    from rlcore.loop.native import chat_prompts as chat_prompts
    from rlcore.loop.native import native_components as native_components
    from rlcore.models.importing import import_model as import_model
    from rlcore.models.loading import load_policy as load_policy
    from rlcore.models.loading import save_model as save_model
    from rlcore.rewards.table import RewardResources as RewardResources
    from rlcore.rewards.table import build_rewards as build_rewards
    from rlcore.rewards.user_function import function_reward as function_reward
    from rlcore.sampling.base import Sampler as Sampler
    from rlcore.sampling.base import SamplingParams as SamplingParams
    from rlcore.sampling.native import NativeSampler as NativeSampler
    from rlcore.sampling.scripted import ScriptedSampler as ScriptedSampler
    from rlcore.text.tokenization import ChatTokenizer as ChatTokenizer
    from rlcore.training.learner import Learner as Learner
    from rlcore.types import FailedRollout as FailedRollout
    from rlcore.types import Message as Message
    from rlcore.types import Prompt as Prompt
    from rlcore.types import Rollout as Rollout
    from rlcore.types import Score as Score
    from rlcore.types import ScoredRollout as ScoredRollout

# The imports above, which only type checkers run.
_IMPORTS = re.findall(r"^    from (\S+) import (\w+) as \2$", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
_HOMES: Mapping[str, str] = MappingProxyType({name: module for module, name in _IMPORTS})
__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list, which tests/rlcore/test_public.py holds


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
