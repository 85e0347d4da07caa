"""A few days of ``tests.soak.year``: times are spread over days, and what is older and unneeded goes."""

from __future__ import annotations

from rlcore.tasks.operations.garbage import collect
from rlcore.tasks.store.settings import Home
from tests.soak.year import live, report, size_of, spread


def test_of_five_days_the_first_two_go_and_the_state_shrinks(tracked_home: Home) -> None:
    first = live(tracked_home, [0])
    begun = first + live(tracked_home, range(1, 5))
    spread(tracked_home, begun)
    before = size_of(tracked_home)
    gone = {line.kind: line.count for line in collect(tracked_home, keep_days=2.5).lines}
    after = size_of(tracked_home)
    # The third was refused and is the challenger; the fourth and fifth are previous and champion.
    assert (gone["weights of a version"], gone["result: policy"], gone["result: dataset"]) == (2, 2, 2)
    assert gone["result: checkpoint"] == 1  # the copy of the first that the second started from
    assert (after.bytes < before.bytes, after.names < before.names) == (True, True)
    table = report({"before": (before, {"plan": 1.0}), "after": (after, {"plan": 0.5})})
    assert "| rlcore plan, s of a processor | 1.00 | 0.50 |" in table
