"""Prompts as tokens: whose they are where there are several data sets, and whether the model has room for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlcore.errors import CanaryError
from rlcore.tasks.steps import tokens
from rlcore.tasks.steps.rows import PromptRow, read_prompts
from rlcore.tasks.steps.tokens import read_prompt_sets, tokenize_prompts
from rlcore.tasks.store.storage import write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

ROW = PromptRow(prompt_id="1", messages=(Message(role="user", content="3+4"),), reference="7", task="sums")


def context_of(folder: Path, **datasets: list[str]) -> Any:
    """Prepared data sets, each with prompts of these ids; nothing else of a context is read."""
    for name, ids in datasets.items():
        (folder / name).mkdir()
        rows = [
            {
                "prompt_id": each,
                "messages": [{"role": "user", "content": f"{name} {each}"}],
                "reference": {"1": "7", "2": "9"}.get(each, ""),
                "task": name,
                "split": "train",
            }
            for each in ids
        ]
        write_table(pd.DataFrame(rows), folder / name / "train.parquet")
    return SimpleNamespace(inputs={f"prepare_{name}": folder / name for name in datasets})


def test_a_prompt_ends_where_the_policy_begins_to_write(tokenizer: ChatTokenizer) -> None:
    (prompt,) = tokenize_prompts([ROW], tokenizer, dataset="gsm8k")
    assert prompt.token_ids == tokenizer.render_prompt(ROW.messages)
    assert (prompt.prompt_id, prompt.reference, prompt.task, prompt.dataset) == ("1", "7", "sums", "gsm8k")


def test_ids_begin_with_the_data_set_only_where_there_are_several(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    context = context_of(tmp_path, maths=["1", "2"], code=["1"])
    several = read_prompt_sets(context, ["maths", "code"], "train", tokenizer)
    assert [prompt.prompt_id for prompt in several] == ["maths/1", "maths/2", "code/1"]
    assert [prompt.dataset for prompt in several] == ["maths", "maths", "code"]
    alone = read_prompt_sets(context, ["maths"], "train", tokenizer)
    assert [prompt.prompt_id for prompt in alone] == ["1", "2"]


def test_a_reference_of_another_row_is_found(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(path: Path) -> list[PromptRow]:
        rows = read_prompts(path)
        return [replace(row, reference=rows[place - 1].reference) for place, row in enumerate(rows)]

    monkeypatch.setattr(tokens, "read_prompts", moved)
    with pytest.raises(CanaryError, match=r"prompt 'maths/1' has the reference answer '9'.* own reference is '7'"):
        read_prompt_sets(context_of(tmp_path, maths=["1", "2"], code=["3"]), ["maths", "code"], "train", tokenizer)


def test_a_limit_is_of_each_data_set(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    context = context_of(tmp_path, maths=["1", "2", "3"], code=["1"])
    limited = read_prompt_sets(context, ["maths", "code"], "train", tokenizer, limit=2)
    assert [prompt.prompt_id for prompt in limited] == ["maths/1", "maths/2", "code/1"]
