"""Faulty inputs, some of each family in the fast tests, and files that hypothesis damages: all lines are counted."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.adapters import convert
from rlcore.data_contracts.adapters.table import ADAPTERS, CONTRACTS, Kind
from rlcore.data_contracts.contracts.contract import violations
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import read_source
from tests.attack.bad_data.case import CONTRACTS as NAMES
from tests.attack.bad_data.case import Case, Contract
from tests.attack.bad_data.case import rows as sound_rows
from tests.attack.bad_data.run import all_cases, attack, faults
from tests.data_contracts.adapters.test_table import ROWS
from tests.data_contracts.gate.gating import gate_source

CASES = all_cases()


def some() -> list[Case]:
    by_family: dict[str, list[Case]] = {}
    for case in CASES:
        by_family.setdefault(case.family, []).append(case)
    return [one for cases in by_family.values() for one in (cases[0], cases[len(cases) // 2])]


def test_there_are_enough_cases_and_no_two_are_one() -> None:
    names = Counter((case.family, case.name) for case in CASES)
    assert len(names) == len(CASES) >= 400


@pytest.mark.parametrize("case", some(), ids=lambda case: f"{case.family}: {case.name}")
def test_an_input_of_each_family_is_taken_set_aside_or_refused_as_it_should_be(case: Case, tmp_path: Path) -> None:
    assert list(faults(case, attack(case, tmp_path))) == []


@pytest.mark.slow
def test_no_faulty_input_is_taken_in_silence_and_no_sound_one_is_refused(tmp_path: Path) -> None:
    wrong = []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong += faults(case, attack(case, folder))
    assert wrong == []


KINDS: Mapping[Contract, Kind] = {
    "prompts": "prompts",
    "demonstrations": "demonstrations",
    "preference_pairs": "preferences",
}
LOOSE: dict[str, Any] = {"max_tokens": 200, "max_quarantined": 1.0}
NO_TEXTS = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400)
TEXTS = st.text() | st.sampled_from(["\u200b", "\0", "<|end|>", "train", "1e999", "preference_pairs/v9"])
VALUES = st.recursive(
    NO_TEXTS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
PIECES = st.binary(max_size=8) | st.sampled_from([b"\n", b"\r\n", b"\xef\xbb\xbf", b"\0", b'"', b"\\ud800", b"[" * 50])
DAMAGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES), min_size=1, max_size=4)


def damaged(content: bytes, damages: Sequence[tuple[float, int, bytes]]) -> bytes:
    """Other bytes in the place of some, more or fewer."""
    for share, size, piece in damages:
        start = int(share * len(content))
        content = content[:start] + piece + content[start + size :]
    return content


def require_an_account(path: Path, contract: Contract) -> int | None:
    """The number of lines, all accounted for, or None where the file is refused in words."""
    try:
        report = gate_source(read_source(path), KINDS[contract], **LOOSE).report
    except ContractError as error:
        assert error.what
        return None
    assert report.accepted + report.quarantined == report.rows_read == report.lines_read - report.merged
    return report.lines_read


@settings(deadline=None, max_examples=40)
@given(contract=st.sampled_from(NAMES), damages=DAMAGES)
def test_every_line_of_a_damaged_file_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, contract: Contract, damages: list[tuple[float, int, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_bytes(damaged(b"\n".join(json.dumps(row).encode() for row in sound_rows(contract)), damages))
    lines = [line.removeprefix(b"\xef\xbb\xbf").strip() for line in path.read_bytes().split(b"\n")]
    assert require_an_account(path, contract) in (len([line for line in lines if line]), None)


@settings(deadline=None, max_examples=60)
@given(contract=st.sampled_from(NAMES), damages=DAMAGES)
def test_a_damaged_table_is_refused_or_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, contract: Contract, damages: list[tuple[float, int, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(sound_rows(contract)), path, compression="none")
    path.write_bytes(damaged(path.read_bytes(), damages))
    require_an_account(path, contract)


@st.composite
def changed_rows(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An adapter, and a row of it in which a value at any depth is another one."""
    adapter = draw(st.sampled_from(sorted(ROWS)))
    row = copy.deepcopy(dict(ROWS[adapter]))
    node: Any = row
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or draw(st.booleans()):
            node[key] = draw(VALUES)
            return adapter, row
        node = node[key]


@settings(deadline=None, max_examples=150)
@given(changed_rows())
@example(("ranked_sets", {**ROWS["ranked_sets"], "ranks": [10**400, 0]}))  # no float is as large
def test_an_adapter_names_the_fault_of_a_row_or_makes_rows_that_can_be_judged(
    found: tuple[str, dict[str, Any]],
) -> None:
    adapter, row = found
    for kind in ADAPTERS[adapter].rows:
        try:
            made = ADAPTERS[adapter].rows[kind](row)
        except RowError as error:
            assert error.field
            assert error.reason
            continue
        frame = pd.DataFrame([{"split": "train", **one} for one in made], columns=list(CONTRACTS[kind].columns))
        assert all(one.row >= 0 and one.reason for one in violations(frame, convert.contract_of(adapter, kind)))
