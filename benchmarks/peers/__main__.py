"""Command line of the comparison with TRL.

    python -m benchmarks peers [headline | supervised | grpo | ppo] [--only TEXT] [--rounds 3]

``make bench`` runs ``headline``. A plan writes benchmarks/results/peers-PLAN.json, and from it the tables of README and
docs. If two sides did different work it ends without any figure. ``--only`` runs the comparisons whose title has the
text, and publishes nothing. ``ppo`` runs under the last TRL that has a PPO trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.peers import pages
from benchmarks.peers.compare import LAST_WITH_PPO, PLANS, run_plan
from benchmarks.peers.same import UnequalWorkError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", choices=PLANS, default="headline")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    if options.plan == "ppo":
        os.environ["PYTHONPATH"] = str(LAST_WITH_PPO)  # of the sides' processes
        sys.path.insert(0, str(LAST_WITH_PPO))
    chosen = [each for each in PLANS[options.plan] if options.only in each.title]
    if options.rounds:
        chosen = [replace(each, rounds=options.rounds) for each in chosen]
    is_whole = chosen == PLANS[options.plan]
    out = pages.results_of(options.plan) if is_whole else Path(".rlcore/bench-peers.json")
    try:
        results = run_plan(options.plan, chosen, out=out)
    except UnequalWorkError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if is_whole:
        pages.write(pages.published())
    sys.stdout.write(f"{pages.block(results)}\n\nEvery timing: {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
