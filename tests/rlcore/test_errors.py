"""Errors say what, where and how to mend it, and survive the way between processes."""

from __future__ import annotations

import copy
import inspect

import pytest

from rlcore import errors
from rlcore.errors import RlcoreError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RlcoreError)]


def test_the_message_says_what_where_and_how_to_mend_it() -> None:
    error = errors.DataError("row 3 has no prompt", where="data.jsonl:3", fix="add the column")
    assert str(error) == "row 3 has no prompt\n  where: data.jsonl:3\n  fix:   add the column"


def test_what_is_unknown_leaves_no_empty_line() -> None:
    assert str(errors.DataError("row 3 has no prompt")) == "row 3 has no prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_kind_and_its_parts_when_it_crosses_processes(kind: type[RlcoreError]) -> None:
    # copy uses the same protocol as the way between processes, __reduce__.
    error = copy.copy(kind("what", where="where", fix="fix"))
    assert (type(error), error.what, error.where, error.fix) == (kind, "what", "where", "fix")


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    assert all(kind.__name__ in errors.__doc__ for kind in KINDS)
    assert len(KINDS) == 17


def test_special_errors_are_caught_with_their_family() -> None:
    assert issubclass(errors.StaleSamplerError, errors.SamplingError)
    assert issubclass(errors.NonFiniteError, errors.TrainingError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_in_its_docstring_when_it_is_raised(kind: type[RlcoreError]) -> None:
    assert kind.__doc__
