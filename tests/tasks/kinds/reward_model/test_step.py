from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.errors import StorageError, TrainingError
from rlcore.tasks.kinds.reward_model.step import _require_accuracy, run_reward_model


def test_a_start_that_is_not_the_sealed_one_is_not_trained_on(tmp_path: Path) -> None:
    config = SimpleNamespace(stage=SimpleNamespace(settings=None, half="all"))
    context: Any = SimpleNamespace(inputs={"sft": tmp_path}, config=config)
    with pytest.raises(StorageError, match="digests of the model are unreadable"):
        run_reward_model(context, start="sft")


@pytest.mark.parametrize("found", [0.59, float("nan")])
def test_an_accuracy_below_the_bound_or_that_is_no_number_fails_the_stage(found: float) -> None:
    _require_accuracy(0.6, 0.6, where="")
    with pytest.raises(TrainingError, match=r"the preset requires 0\.600"):
        _require_accuracy(found, 0.6, where="")
