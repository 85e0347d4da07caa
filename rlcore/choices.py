"""Tables whose rows are chosen by a setting."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

Row = TypeVar("Row")


def choices(setting: str, rows: Mapping[str, Row]) -> Mapping[str, Row]:
    """Return a table of rows, one for each value of ``setting``.

    The cache key of a pipeline stage reads such tables in the source, where they stand at the top level of a module
    with literal names. Of what the module imports, it counts what the rows of this preset use, and no other row's.
    """
    return MappingProxyType(dict(rows))
