"""Rows that were erased do not pass the gate, whatever the spelling of their prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from rlcore.data_contracts.adapters.table import CONTRACTS, OWN_ROWS
from rlcore.data_contracts.gate import data_gate
from rlcore.data_contracts.gate.data_gate import GateLimits, GateResult
from rlcore.data_contracts.gate.denied import ERASED, DeniedPrompts
from rlcore.data_contracts.gate.reading import source_of
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.text import prompt_hash
from tests.data_contracts.gate.gating import METER

ASKED = [{"role": "user", "content": "Where does Zoë live?"}]
SPELLED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " where  does ZOË live?"}]


def row(number: int, messages: list[dict[str, str]] | None = None) -> dict[str, Any]:
    asked = messages or [{"role": "user", "content": f"Question {number}"}]
    return {"prompt_id": f"p{number}", "messages": asked, "reference": str(number), "task": "t"}


def gated(denied: DeniedPrompts, **limits: Any) -> tuple[GateResult, pd.DataFrame]:
    rows = [*map(row, range(8)), row(8, ASKED), {**row(9, SPELLED), "reference": "8"}]
    stream = replace(RowStream(source=source_of("t", rows), make=OWN_ROWS["prompts"]), denied=denied)
    frames: list[pd.DataFrame] = []
    settings = {"num_train": 20, "num_eval": 2, "max_tokens": 20, "max_quarantined": 0.0, **limits}
    result = data_gate.check(stream, CONTRACTS["prompts"], GateLimits(**settings), meter=METER, sink=frames.append)
    return result, pd.concat(frames)


def denied() -> DeniedPrompts:
    none = DeniedPrompts(key=b"k")
    return replace(none, digests=frozenset([none.digest_of(prompt_hash(ASKED))]))


def test_a_row_with_an_erased_prompt_is_left_out_and_counted_and_breaks_no_limit() -> None:
    result, kept = gated(denied())
    assert result.report.passed
    assert result.report.reasons == {ERASED: 2}
    assert sorted(kept["prompt_id"]) == [f"p{number}" for number in range(8)]


def test_the_quarantine_has_the_line_of_an_erased_row_and_neither_text_nor_digest() -> None:
    result, _ = gated(denied())
    assert [(each.origin.line, each.excerpt, each.origin.digest) for each in result.quarantine] == [
        (9, "", ""),
        (10, "", ""),
    ]


def test_without_the_key_a_digest_is_of_no_prompt() -> None:
    result, kept = gated(replace(denied(), key=b"another"), max_quarantined=1.0)
    assert ERASED not in result.report.reasons
    assert {"p8", "p9"} & {*kept["prompt_id"]}
