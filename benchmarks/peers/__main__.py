"""Command line of the comparison with TRL.

    python -m benchmarks peers [headline | supervised] [--only TEXT] [--rounds 3]

``make bench`` runs ``headline``. A plan prints its tables and writes benchmarks/results/peers-PLAN.json, unless two
sides did different work. ``--only`` runs the comparisons whose title has the text, and writes .rlcore/bench-peers.json.
``side ours|trl WORK SETTING`` is one side in its own process; its last line is the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from benchmarks.peers.compare import PLANS, render, run_plan
from benchmarks.peers.record import Record, UnequalWorkError
from benchmarks.peers.work import Work


def main() -> int:
    """Run a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", choices=PLANS, default="headline")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    chosen = [each for each in PLANS[options.plan] if options.only in each.title]
    if options.rounds:
        chosen = [replace(each, rounds=options.rounds) for each in chosen]
    is_whole = chosen == PLANS[options.plan]
    out = Path(f"benchmarks/results/peers-{options.plan}.json" if is_whole else ".rlcore/bench-peers.json")
    try:
        results = run_plan(options.plan, chosen, out=out)
    except UnequalWorkError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{render(results)}\n\nEvery timing: {out}\n")
    return 0


def run_side(side: str, work: str, setting: str) -> int:
    """Do the work of a side, both given as JSON, and print the record."""
    task = Work(**json.loads(work))
    getattr(import_module(f"benchmarks.peers.{side}"), task.task)(task, Record(task), **json.loads(setting))
    return 0


if __name__ == "__main__":
    sys.exit(run_side(*sys.argv[2:]) if sys.argv[1:2] == ["side"] else main())
