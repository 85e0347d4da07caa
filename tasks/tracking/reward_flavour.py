"""Reward model as MLflow ``pyfunc``: a score for each answer, if rlcore is installed.

No external library has its heads, ensembles and scales, so its checkpoint is no model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rlcore.models.loading import load_policy
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

_TOKENS = 8192  # rows of a batch
_FOLDER = "model"


class Scorer:
    """Scorer of centered rewards in standard deviations of the model's reference set, the mean of its members."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = ChatTokenizer.load(checkpoint)
        backbone = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        self._model = load_reward_model(backbone, checkpoint)

    def predict(self, rows: pd.DataFrame, params: Mapping[str, Any] | None = None) -> list[float]:
        """Score each row of the columns ``messages`` (a conversation) and ``completion`` (its answer)."""
        sequences = []
        for messages, completion in zip(rows["messages"], rows["completion"], strict=True):
            turns = [Message(role=turn["role"], content=turn["content"]) for turn in messages]
            prompt_ids, completion_ids = self._tokenizer.render_demonstration(turns, completion)
            sequences.append(TokenSequence(prompt_ids=prompt_ids, completion_ids=completion_ids))
        rewards = self._model.rewards(sequences, tokens_per_microbatch=_TOKENS)
        return [float(value) for value in rewards.mean(dim=0)]


def _load_pyfunc(path: str) -> Scorer:
    """Load the model of a folder of registered files for MLflow."""
    return Scorer(Path(path) / _FOLDER)
