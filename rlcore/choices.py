"""Tables from which a setting selects a row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

Row = TypeVar("Row")


def choices(setting: str, rows: Mapping[str, Row]) -> Mapping[str, Row]:
    """Return a table of rows, one for each value of ``setting``.

    Cache keys read tables from the source, at the top level of a module, with literal names. A key covers only imports
    of the selected row.
    """
    return MappingProxyType(dict(rows))
