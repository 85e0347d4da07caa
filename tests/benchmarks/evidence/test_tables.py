"""Tables: what was planned, found, not run, and what the arms cost."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.evidence.findings import findings
from benchmarks.evidence.tables import arms_table, claims_table, plan_table
from tests.benchmarks.evidence.sample import CLAIMS, TWO_TASKS, arms, plan, run


def test_the_plan_has_the_seeds_that_it_needs(tmp_path: Path) -> None:
    rows = plan_table(plan(tmp_path)).splitlines()[2:]
    # Two arms have one degree of freedom per seed; nothing is expected of an accuracy's deviation.
    assert rows[0].startswith("| The fast method learns faster | fast against slow | learning | +0.05 | ")
    assert 3 < int(rows[0].split(" | ")[-1].removesuffix(" |")) < 20
    assert rows[1].endswith("| end | accuracy | within ±0.05 | – |")


def test_each_claim_has_its_verdict_on_each_task(tmp_path: Path) -> None:
    chosen, tasks = plan(tmp_path, TWO_TASKS), {"sums": arms(), "words": {}}
    rows = claims_table(chosen, findings(chosen, tasks)).splitlines()[2:]
    assert rows[0].startswith("| The fast method learns faster | fast against slow | +0.170 [+0.1")
    assert re.search(r", 3 seeds \(alone \[[-+.\d]+, [-+.\d]+\]\), \*\*held\*\* \| not run \| – \|$", rows[0])
    assert rows[1].endswith("]), **held** | – | – |")
    assert "| +0.250 [" in rows[2] or "| +0.250 no interval, 1 seed, not judged | not run" in rows[2]


def test_what_is_not_told_apart_has_the_seeds_that_would_tell(tmp_path: Path) -> None:
    noisy = {seed: run([0.2, 0.3, last], right="1" * (100 + seed)) for seed, last in enumerate((0.3, 0.5, 0.9))}
    chosen, tasks = plan(tmp_path), {"sums": arms() | {"fast": noisy}}
    found = findings(chosen, tasks)
    assert f"**not told apart** | sums {found[0].needed or 'above 99'} |" in claims_table(chosen, found)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    chosen = plan(tmp_path, CLAIMS)
    one = {name: {0: runs[0]} for name, runs in arms().items()}
    row = claims_table(chosen, findings(chosen, {"sums": one})).splitlines()[2]
    assert row.endswith("+0.167 no interval, 1 seed, **not told apart** | sums ? |")


def test_arms_have_their_accuracy_and_costs() -> None:
    rows = arms_table(arms()).splitlines()
    assert rows[3] == "| slow | 0.743 | 0.750, 0.743, 0.735 | 300 | 3,000 | 35 |"
    assert rows[4] == "| start | 0.500 | 0.500 | 0 | 0 | 0 |"
