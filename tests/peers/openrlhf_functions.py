"""OpenRLHF's loss and advantage functions, without its GPU stack.

Its packages import DeepSpeed and flash-attention when they are loaded. The functions called here use neither, so their
packages are entered without running their ``__init__``, and DeepSpeed and the Ray launcher are empty modules.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  # first: it looks for DeepSpeed, and must not find the empty module


def _enter_package(name: str, folder: Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def _load() -> tuple[Any, Any, Any]:
    spec = find_spec("openrlhf")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    _enter_package("openrlhf.models", root / "models")
    _enter_package("openrlhf.trainer.ray", root / "trainer" / "ray")
    for name in ("deepspeed", "openrlhf.trainer.ray.launcher"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["openrlhf.trainer.ray.launcher"].RayActorGroup = object  # type: ignore[attr-defined]
    names = ("openrlhf.models.loss", "openrlhf.models.utils", "openrlhf.trainer.ppo_utils.experience_maker")
    losses, utils, maker = (importlib.import_module(name) for name in names)
    del sys.modules["deepspeed"]  # other libraries ask whether it is installed
    return losses, utils, maker.RemoteExperienceMaker


losses, utils, ExperienceMaker = _load()


def advantages(rewards: torch.Tensor, *, group_size: int, estimator: str, mask: torch.Tensor) -> torch.Tensor:
    """The advantages [S, T] that its experience maker gives completions with these rewards, without a KL penalty."""
    advantage = types.SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = types.SimpleNamespace(
        algo=types.SimpleNamespace(advantage=advantage),
        rollout=types.SimpleNamespace(n_samples_per_prompt=group_size),
        reward=types.SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = ExperienceMaker.__new__(ExperienceMaker)  # its constructor wants the Ray actors of a whole run
    maker.strategy, maker.advantage_estimator = types.SimpleNamespace(args=args), estimator
    maker.kl_ctl = types.SimpleNamespace(value=0.0)
    experience = types.SimpleNamespace(
        rewards=rewards.clone(),
        index=list(range(len(rewards))),
        kl=torch.zeros(mask.shape),
        action_mask=mask.long(),
        info={},
    )
    made: torch.Tensor = maker.compute_advantages_and_returns([experience])[0].advantages
    return made * mask


def gae(
    values: torch.Tensor, token_rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> torch.Tensor:
    """Its GAE [S, T], before whitening."""
    made: torch.Tensor = ExperienceMaker.get_advantages_and_returns(None, values, token_rewards, mask, gamma, lam)[0]
    return made * mask
