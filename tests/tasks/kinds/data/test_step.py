"""A dataset's evaluation rows are in no other dataset's training rows, in any order of preparation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.gate.overlap import FEWEST_WORDS
from rlcore.errors import ConfigError, DataError
from rlcore.tasks.kinds.data.step import _refuse_leaks, evaluated_prompts
from rlcore.tasks.presets.data import ComparisonConfig, DatasetConfig
from rlcore.tasks.store.storage import write_table


def snapshot(folder: Path, *, train: list[str], held_out: list[str]) -> Path:
    for split, questions in (("train", train), ("eval", held_out)):
        rows = [
            {
                "prompt_id": f"{split}-{place}",
                "messages": [{"role": "user", "content": question}],
                "reference": "1",
                "task": "sums",
                "split": split,
            }
            for place, question in enumerate(questions)
        ]
        write_table(pd.DataFrame(rows), folder / f"{split}.parquet")
    return folder


def test_evaluation_prompts_that_an_earlier_data_set_trains_on_are_refused_by_name(tmp_path: Path) -> None:
    first = snapshot(tmp_path / "first", train=["1+1", "1+2"], held_out=["1+3"])
    clean = snapshot(tmp_path / "clean", train=["2+1"], held_out=["2+2"])
    leaking = snapshot(tmp_path / "leaking", train=["2+1"], held_out=["1 + 2 ?", "2+2"])
    settings = SimpleNamespace(data={"second": dataset("prompts")})
    context: Any = SimpleNamespace(folder=clean, inputs={"prepare_first": first}, config=settings)
    _refuse_leaks(context, "second", ("prepare_first",))
    assert len(evaluated_prompts(context, ("prepare_first",))) == 1
    context.folder = leaking
    with pytest.raises(DataError, match=r"1 evaluation prompts .* \(prepare_first\); .*1 \+ 2(?s:.*)data\.second"):
        _refuse_leaks(context, "second", ("prepare_first",))
    settings.data["second"] = dataset("prompts", compare="exact")
    _refuse_leaks(context, "second", ("prepare_first",))
    settings.data["second"] = dataset("reasoning_gym")  # whose puzzles are made of signs
    _refuse_leaks(context, "second", ("prepare_first",))


def test_where_shared_words_are_refused_so_are_evaluation_prompts_that_share_them_with_an_earlier_data_set(
    tmp_path: Path,
) -> None:
    words = " ".join(f"w{place}" for place in range(10))
    first = snapshot(tmp_path / "first", train=[f"Say {words}, please"], held_out=["1+3"])
    second = snapshot(tmp_path / "second", train=["2+1"], held_out=[f"{words}?", "2+2"])
    settings = SimpleNamespace(data={"second": dataset("prompts")})
    context: Any = SimpleNamespace(folder=second, inputs={"prepare_first": first}, config=settings)
    _refuse_leaks(context, "second", ("prepare_first",))
    for action in ("quarantine", "refuse"):
        settings.data["second"] = dataset("prompts", ngram_overlap=action)
        with pytest.raises(DataError, match=r"1 evaluation prompts share 13 words .* \(prepare_first\)"):
            _refuse_leaks(context, "second", ("prepare_first",))


def test_fewer_words_than_make_a_leak_are_no_setting() -> None:
    assert dataset("prompts", ngram_size=FEWEST_WORDS).comparison.ngram_size == 8
    with pytest.raises(ConfigError, match="ngram_size must be at least 8"):
        dataset("prompts", ngram_size=FEWEST_WORDS - 1)


def dataset(adapter: str, **changes: Any) -> DatasetConfig:
    comparison = ComparisonConfig(**changes)
    return DatasetConfig(
        contract="prompts", adapter=adapter, num_train=2, num_eval=1, max_tokens=9, comparison=comparison
    )
