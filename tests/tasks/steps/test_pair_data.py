"""Anchors without a pair: nothing would show which side a reward model prefers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.errors import DataError
from rlcore.tasks.steps.pair_data import read_gold_pairs
from rlcore.tasks.steps.rows import PairRow
from rlcore.tasks.store.storage import write_table


def test_anchors_that_have_no_pair_are_refused(tmp_path: Path) -> None:
    empty = pd.DataFrame({name: pd.Series(dtype=object) for name in (*PairRow.__dataclass_fields__, "split")})
    for split in ("train", "eval"):
        write_table(empty, tmp_path / f"{split}.parquet")
    config = SimpleNamespace(
        stage=SimpleNamespace(gold_pairs=("known",)), data={"known": SimpleNamespace(max_tokens=9)}
    )
    context: Any = SimpleNamespace(config=config, inputs={"prepare_known": tmp_path}, stage="reward_model")
    tokenizer: Any = None
    with pytest.raises(DataError, match="gold_pairs have no pair"):
        read_gold_pairs(context, tokenizer)
    config.stage.gold_pairs = ()
    assert read_gold_pairs(context, tokenizer) == []
