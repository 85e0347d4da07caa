"""Reward worker in a process of a cluster: the reward of a run, including reward models, term by term."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlcore.config import RewardTerm
from rlcore.distributed.serialization import encode_error
from rlcore.hardware.machine import PRECISIONS
from rlcore.hardware.runtime import Runtime
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.rewards.mix import WeightedReward, scores_of
from rlcore.rewards.reward_model import token_scorer
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.strict_config import build


class Scorer:
    """Reward of a run."""

    exported = b""

    def __init__(self, reward: WeightedReward) -> None:
        self._reward = reward

    def facts(self) -> dict[str, Any]:
        return {}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of rollouts by a term, given by its number."""
        try:
            if method != "score":
                raise ValueError(f"a scorer has no method {method}")
            number, rollouts = arguments
            return {"result": scores_of(self._reward.terms[number].reward, rollouts)}
        except Exception as error:  # noqa: BLE001 - sent to the caller
            return encode_error(error)


@contextmanager
def open_scorer(setup: Mapping[str, Any]) -> Iterator[Scorer]:
    """Open the scorer of a setup."""
    torch.set_num_threads(setup["threads"])
    runtime = Runtime(device=torch.device(setup["device"]), compute_dtype=PRECISIONS[setup["dtype"]])
    scorers = {
        name: token_scorer(load_reward_model(runtime.load_frozen(folder), folder), setup["tokens_per_microbatch"])
        for name, folder in setup["models"].items()
    }
    resources = RewardResources(score_tokens=scorers, prefill=setup["prefill"])
    terms = [build(RewardTerm, term) for term in json.loads(json.dumps(setup["terms"]))]
    with build_rewards(terms, resources=resources) as reward:
        yield Scorer(reward)
