"""``benchmark_records/v1``: one figure for each document, task and metric."""

from __future__ import annotations

import pandas as pd
import pytest

from rlcore.data_contracts.contracts.benchmark_records import CONTRACT
from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.errors import ContractError

ROW = {"task": "sums", "doc_id": 0, "doc_sha256": "a" * 64, "metric": "acc,none", "value": 1.0}


def test_sound_records_pass() -> None:
    require(pd.DataFrame([ROW, {**ROW, "doc_id": 1, "value": 0.25}]), CONTRACT)


@pytest.mark.parametrize(
    "change",
    [{"task": " "}, {"doc_id": -1}, {"doc_sha256": "a" * 63}, {"metric": ""}, {"value": float("nan")}, {"more": 1}],
)
def test_a_row_that_breaks_the_contract_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        require(pd.DataFrame([{**ROW, **change}]), CONTRACT)


def test_a_document_stands_once() -> None:
    with pytest.raises(ContractError, match=r"1 rows are there twice, first .*acc,none"):
        require(pd.DataFrame([ROW, ROW]), CONTRACT)
