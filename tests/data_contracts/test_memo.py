from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts import text
from rlcore.data_contracts.drift import sketches
from rlcore.data_contracts.gate.records import canonical_json, canonical_row
from rlcore.data_contracts.gate.strict_json import _parse_fast, _strictly, parse_object
from rlcore.data_contracts.memo import BoundedMemo
from tests.reference import data_gate as slow

MARKS = st.sampled_from([*"abI09 .,;:!?'\"`()-+*/&_#\n\t\x00\x0b\u200b", " '", "&amp;", "ß", "漢", "а", "é", "２", "²"])
TEXTS = st.one_of(st.lists(MARKS, max_size=24).map("".join), st.text(st.characters(exclude_categories=["Cs"])))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
LINES = [
    *(b'{"a": 1, "a": 2}', b'{"a": "b", "a": "b"}', b'{"a": {"b": "", "b": ""}}', b'{"a": "\\"", "a": 1}'),
    *(b'{"a": 18446744073709551616}', b'{"a": -0.0}', b'{"a": -0}', b'{"a": 1e999}', b'{"a": NaN}', b"[1]", b'"a"'),
    *(b'{"a": "\\ud800"}', b'{"a": "\\u0000"}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\\\\", "a": "\\\\"}', b"{" * 40),
    *(b'{"a": "b"} {', b'\xef\xbb\xbf{"a": 1}', b'{"a": "\t"}', b'{"a": 01}', b' {"a": "\\\\\\"" }\t', b""),
]


def test_a_text_is_worked_out_once_and_all_is_forgotten_when_it_is_full() -> None:
    asked: list[str] = []
    found = BoundedMemo(lambda one: asked.append(one) or len(one), most=2)  # type: ignore[func-returns-value]
    assert list(map(found.__getitem__, ["a", "bb", "a", "bb"])) == [1, 2, 1, 2]
    assert asked == ["a", "bb"]
    assert found["ccc"] == 3
    assert dict(found) == {"ccc": 3}


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_texts_are_compared_hashed_and_sketched_as_the_reference_does(one: str) -> None:
    question = slow.question_text(one)
    assert text.question_and_hashes(one) == (question, slow.hashes(question.split()))
    assert text.hashes_of_words(one) == slow.hashes(slow.words_of(one))
    assert (sketches.script_of(one), sketches.word_of(one)) == (slow.script_of(one), slow.word_of(one))


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.booleans())
def test_rows_are_spelled_and_lines_are_read_as_the_reference_does(row: dict[str, Any], is_ascii: bool) -> None:
    assert canonical_row(row) == canonical_json(row) == slow.canonical_json(row)
    _same(json.dumps(row, ensure_ascii=is_ascii).encode())


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_the_two_parsers_may_read_differently_is_left_to_the_strict_one(line: bytes) -> None:
    _same(line)


def test_a_usual_row_is_read_by_the_fast_parser() -> None:
    assert _parse_fast(b'{"a": "say \\"b\\"\\n", "c": [{"d": 1.5}, 2, null]}') == {
        "a": 'say "b"\n',
        "c": [{"d": 1.5}, 2, None],
    }


def _same(line: bytes) -> None:
    try:
        strict = repr(_strictly(line))
    except ValueError as error:
        with pytest.raises(ValueError) as found:
            parse_object(line)
        assert str(found.value) == str(error)
    else:
        assert repr(parse_object(line)) == strict
