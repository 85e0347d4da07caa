"""Attacks, each a small program in ``rows``: those that fake a right answer, and those that try to leave the box."""

from __future__ import annotations

from tests.rows import rows_of

# Ways in which tests call a function, each with a right answer of ``square``.
IDIOMS: tuple[str, ...] = (
    "for y, z in zip(map({f}, [1, 2]), [1, 4]): assert y == z", "for y in map({f}, [3]): assert y == 9",
    "for x, y in zip([1, 2], map({f}, [1, 2])): assert y == x * x",
    "assert all(y == z for y, z in zip(map({f}, [1, 2]), [1, 4]))", "assert not [y for y in map({f}, [3]) if y != 9]",
    "assert not list(filter(lambda y: y != 9, map({f}, [3])))", "assert not any(y != 9 for y in map({f}, [3]))",
    "for y in filter({f}, [3]): assert y == 3", "for y in iter(lambda: {f}(3), 9): assert False",
    "import itertools\nfor y in itertools.starmap({f}, [(3,)]): assert y == 9",
    "import itertools\nfor y in itertools.takewhile({f}, [3]): assert y == 3", "[y for y in map({f}, [3])]",
    "list(map({f}, [1, 2, 3]))", "sum(map({f}, [1, 2]))", "max(map({f}, [1, 2]), default=0)", "set(map({f}, [1]))",
    "dict(zip([1], map({f}, [1])))", "assert next(map({f}, [3]), 9) == 9",
    "assert [{f}(x) for x in (1, 2)] == [1, 4]",
    "async def g(): return {f}(3)\ntry:\n    g().send(None)\nexcept StopIteration as end:\n    assert end.value == 9",
)  # fmt: skip

# Each should be refused as ``square``: tested with 3 → 9 and 5 → 25, as values and as assertions.
FAKES = {row["attack"]: row["program"] for row in rows_of(__file__, "fakes")}
ESCAPES = {row["attack"]: row["program"] for row in rows_of(__file__, "escapes")}
