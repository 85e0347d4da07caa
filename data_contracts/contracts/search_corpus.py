"""``search_corpus/v1``: passages for a search tool."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.contracts.column_checks import filled
from rlcore.data_contracts.contracts.contract import Contract, require
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.reading import read_source


class SearchCorpus(pa.DataFrameModel):
    """One row per passage. ``passage_id`` is shown to the policy with the text, and may be quoted."""

    passage_id: str
    text: str

    class Config:
        strict = True
        name = "search_corpus/v1"

    texts_are_filled = filled("passage_id", "text")


CONTRACT = Contract(name="search_corpus/v1", model=SearchCorpus, id_column="passage_id")


def read_corpus(path: Path) -> list[tuple[str, str]]:
    """Return (id, text) of every passage of a JSONL or Parquet file, in its order.

    No line is skipped: it would be missing knowledge.
    Raises:
        ContractError: an unreadable file or line, a row that breaks the contract, or an id that occurs twice.
    """
    source = read_source(path)
    if source.rejected:
        raise ContractError(f"the corpus has unreadable lines: {source.rejected[0]}", where=str(path))
    frame = pd.DataFrame([dict(row.values) for row in source.rows])
    require(frame, CONTRACT)
    repeated = frame.loc[frame["passage_id"].duplicated(), "passage_id"]
    if len(repeated):
        raise ContractError(f"{len(repeated)} ids occur twice, the first is {repeated.iloc[0]!r}", where=str(path))
    return list(zip(frame["passage_id"], frame["text"], strict=True))
