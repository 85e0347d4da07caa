"""A corpus is read whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from rlcore.data_contracts.contracts.search_corpus import read_corpus
from rlcore.data_contracts.errors import ContractError

SOUND = '{"passage_id": "a", "text": "one"}\n{"passage_id": "b", "text": "two"}\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_passages_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert read_corpus(write(tmp_path, SOUND)) == [("a", "one"), ("b", "two")]
    path = tmp_path / "corpus.parquet"
    pd.DataFrame([{"passage_id": "x", "text": "y"}]).to_parquet(path)
    assert read_corpus(path) == [("x", "y")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("{broken\n", "unreadable lines: line 3"),
        ('{"passage_id": "a", "text": "again"}\n', "1 ids occur twice, the first is 'a'"),
        ('{"passage_id": "c", "text": " "}\n', "row 2, text: must not be blank"),
        ('{"passage_id": "c"}\n', "row 2, text"),
        ('{"passage_id": "c", "text": "t", "page": 1}\n', "page"),
    ],
)
def test_a_fault_refuses_the_corpus_and_names_its_place(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        read_corpus(write(tmp_path, SOUND + more))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError):
        read_corpus(write(tmp_path, ""))
