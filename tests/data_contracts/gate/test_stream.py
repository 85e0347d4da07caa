"""Rows go through the gate a batch at a time, and what comes out does not depend on where batches end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.data_contracts.adapters.table import own_ranked_sets
from rlcore.data_contracts.drift.comparison import DriftLimits, by_chance
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate import data_gate, stream
from rlcore.data_contracts.gate.reading import read_source, source_of
from rlcore.data_contracts.gate.stream import RowStream
from tests.data_contracts.gate.gating import Gated, gate_rows, gate_source


def rows() -> list[dict[str, Any]]:
    """Forty pairs of ten prompts, some twice, one against another, some bad."""
    made = [
        {
            "pair_id": f"p{number}",
            "messages": [{"role": "user", "content": f"Question {number % 10} of ten"}],
            "chosen": f"good {number}",
            "rejected": f"bad {number}" if number % 13 else "",
            "source": "t",
        }
        for number in range(40)
    ]
    against = {**made[5], "pair_id": "against", "chosen": made[5]["rejected"], "rejected": made[5]["chosen"]}
    return [*made, made[3], made[13], against]


def gated() -> Gated:
    return gate_rows(rows(), num_train=20, num_eval=8, max_tokens=40)


def test_the_size_of_batches_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gated()
    assert whole.report.quarantined == 6  # four without an answer, and two against each other
    assert whole.report.merged == 2
    for size in (1, 7):
        monkeypatch.setattr(stream, "BATCH_ROWS", size)
        parts = gated()
        assert parts.report == whole.report
        assert parts.quarantine == whole.quarantine
        assert parts.kept.equals(whole.kept)


def test_the_rows_of_a_line_stay_together_and_are_found_by_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_ROWS", 4)
    ranked = {"messages": rows()[0]["messages"], "completions": ["a", "b", "c"], "ranks": [0, 1, 2]}
    source = source_of("t", [{**ranked, "set_id": f"s{number}"} for number in range(5)])
    made = RowStream(source=source, make=own_ranked_sets)
    assert [batch.lines for batch in made.batches()] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3], [4, 4, 4]]
    wanted = np.array([False, True, False, False, True])
    assert [batch.lines for batch in made.batches(wanted)] == [[1, 1, 1, 4, 4, 4], []]


def test_more_refused_rows_than_are_listed_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_gate, "MAX_LISTED", 3)
    bad = [{**row, "chosen": ""} for row in rows()[:40]]
    result = gate_rows([*rows()[:20], *({**row, "pair_id": f"b{row['pair_id']}"} for row in bad)])
    assert result.report.quarantined == 40 + 2
    assert result.report.accepted == 18
    assert len(result.quarantine) == 3


def test_a_few_rows_of_many_are_sketched_those_of_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gated().report.sketches["source"]["counts"]
    monkeypatch.setattr(data_gate, "MAX_SKETCHED", 9)
    some = gated().report
    assert 0 < some.sketches["source"]["counts"]["t"] < whole["t"] == 10
    assert sum(some.sketches["prompt_tokens"]["counts"]) == some.sketches["source"]["counts"]["t"]
    assert some.digest == gated().report.digest


@pytest.mark.parametrize("bins", [27, 1_024])
def test_as_many_rows_are_sketched_as_make_the_bounds_of_chance_small(bins: int) -> None:
    counts = np.full(bins, data_gate.MAX_SKETCHED // bins, dtype=float)
    chance = by_chance(counts, counts, DriftLimits().chance)
    assert max(chance.psi - chance.mean_psi, chance.ks) < 0.05 <= DriftLimits().warn_psi / 2


class Reads:
    """A source that counts how often it is read; ``before`` runs before each reading."""

    def __init__(self, path: Path, before: Callable[[int], object] = lambda count: None) -> None:
        self._source, self._before, self.count = read_source(path), before, 0

    def gated(self) -> Gated:
        return gate_source(replace(self._source, read=self._read), "preferences", num_train=20, num_eval=8)

    def _read(self, wanted: Any) -> Iterator[Any]:
        self.count += 1
        self._before(self.count)
        return self._source.read(wanted)


def written(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def test_a_small_source_is_read_once_and_a_large_one_again_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    once, again = Reads(path), Reads(path)
    small = once.gated()
    monkeypatch.setattr(stream, "HELD_BYTES", 10_000)  # of some 50,000
    monkeypatch.setattr(stream, "BATCH_ROWS", 4)
    large = again.gated()
    assert once.count == 1 < again.count
    assert (large.report, large.quarantine) == (small.report, small.quarantine)
    assert large.kept.equals(small.kept)


@pytest.mark.parametrize("change", [lambda text: text + "\n", lambda text: "", lambda text: text.replace("{", "[")])
@pytest.mark.parametrize("held", [0, 2**26])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, change: Callable[[str], str]
) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(stream, "HELD_BYTES", held)
    reads = Reads(
        path, lambda count: path.write_text(change(path.read_text())) if count == (1 if held else 2) else None
    )
    with pytest.raises(ContractError, match="changed while it was read"):
        reads.gated()
