"""Plain data crosses unchanged, and nothing else crosses."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.sandbox.wire import MAX_DEPTH, MAX_FRAME_BYTES, WireError, decode, encode

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.characters(categories=["Cs"])
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=4)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(HASHABLE) | st.dictionaries(HASHABLE, inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(DATA)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | dict | list | tuple)


def test_the_format_is_what_the_docstring_says() -> None:
    assert encode([1, 2]) == b"l2:i1,i2,"
    assert encode({"a": (True, None)}) == b"d1:s1:au2:TN"
    assert encode(-255) == b"i-ff,"


def test_a_number_keeps_its_type_and_nan_stays_nan() -> None:
    assert [type(decode(encode(value))) for value in (1, 1.0, True)] == [int, float, bool]
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(10**5000)) == 10**5000


def test_a_subclass_is_sent_as_its_plain_type_whatever_it_says_of_itself() -> None:
    class Liar(list[int]):
        def __iter__(self) -> Any:
            return iter([9])

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert type(decode(encode(Liar([1])))) is list
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    assert type(decode(encode(OrderedDict(a=1)))) is dict


@pytest.mark.parametrize(
    "value", [object(), len, 1j, range(3), iter([]), int, {1: object()}, [lambda: 0], set(range(2_001))]
)
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        encode(value)


def test_depth_has_a_bound_on_both_sides() -> None:
    nested: Any = []
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert decode(encode(nested)) == nested
    with pytest.raises(WireError):
        encode([[nested]])
    with pytest.raises(WireError):
        decode(b"l1:" * 60 + b"N")
    with pytest.raises(WireError):
        decode(b"l1:" * 100_000)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"X", b"i", b"i,", b"iZ,", b"i1", b"f,", b"s5:abc", b"s-1:", b"l9:N", b"l99999999:N", b"NN", b"s:",
        b"s1:\xff", b"d1:l0:N", b"t1:l0:", b"t1:d0:", b"t2001:" + b"N" * 2001, b"l1:", b"s99999999999999999999:x",
        b"i" + b" 1,", b"u1:" * 46 + b"N",
    ],
)  # fmt: skip
def test_malformed_bytes_are_refused(data: bytes) -> None:
    if data == b"i 1,":  # what int() forgives is harmless
        assert decode(data) == 1
        return
    with pytest.raises(WireError):
        decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except WireError:
        return
    encode(value)


def test_a_reader_looks_at_the_clock_while_it_reads() -> None:
    looks: list[int] = []
    for value in (list(range(5_000)), [[1]] * 5_000, [[[]]]):
        looks.clear()
        assert decode(encode(value), lambda: looks.append(1)) == value
        assert len(looks) >= len(value) // 1_024 + 1

    def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        decode(encode([1]), late)


def test_a_text_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(WireError):
        encode("x" * (MAX_FRAME_BYTES + 1))
