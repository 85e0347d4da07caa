"""Pairs of several datasets: each set is its dataset's; anchors without a pair are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.errors import DataError
from rlcore.tasks.steps.pair_data import half_of, read_gold_pairs, read_pair_data
from rlcore.tasks.steps.rows import PairRow
from rlcore.tasks.store.storage import write_table
from rlcore.types import Message


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


def context_of(folder: Path, rows: Sequence[dict[str, Any]], data: Sequence[str], **stage: Any) -> Any:
    """A stage of datasets with the same rows for training and evaluation."""
    for name in data:
        (folder / f"prepare_{name}").mkdir(exist_ok=True)
        for split in ("train", "eval"):
            write_table(pd.DataFrame(list(rows)), folder / f"prepare_{name}" / f"{split}.parquet")
    config = SimpleNamespace(
        stage=SimpleNamespace(data=data, **stage), data=dict.fromkeys(data, SimpleNamespace(max_tokens=9))
    )
    inputs = {f"prepare_{name}": folder / f"prepare_{name}" for name in data}
    return SimpleNamespace(config=config, inputs=inputs, stage="reward_model")


def row(question: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    whole = {"pair_id": f"{number}", "set_id": f"{number}", "messages": messages, "chosen": "a", "rejected": "b"}
    return whole | {"margin": 0.0, "probability": 1.0, "weight": 1.0, "source": "s", "split": "train"}


TOKENIZER: Any = SimpleNamespace(render_demonstration=lambda messages, text: ((len(messages),), (ord(text),)))


def test_sets_of_two_datasets_that_share_an_id_stay_apart(tmp_path: Path) -> None:
    context = context_of(tmp_path, [row("q", 1)], ("one", "two"))
    assert [pair.set_id for pair in read_pair_data(context, TOKENIZER).train] == ["one/1", "two/1"]


def test_halves_have_no_prompt_in_common_and_together_all_pairs(tmp_path: Path) -> None:
    rows = [row(f"q{number // 2}", number) for number in range(40)]
    parts = {
        half: read_pair_data(context_of(tmp_path, rows, ("one",), half=half), TOKENIZER)
        for half in ("first", "second", "all")
    }
    questions = [{each.messages for each in parts[half].rows} for half in ("first", "second")]
    assert questions[0] and questions[1] and not questions[0] & questions[1]
    assert len(parts["first"].rows) + len(parts["second"].rows) == len(parts["all"].rows) == 40
    assert [len(part.held_out) for part in parts.values()] == [40] * 3
    asked = (Message(role="user", content="q0"),)
    assert {half_of(each) for each in parts["all"].rows if each.messages == asked} in ({"first"}, {"second"})
