"""What do three steps of a reward model cost, in TRL and here? The work: :mod:`benchmarks.peers.supervised`.

make bench-rm        (python -m benchmarks.peers.reward_trl [--rounds 3] [--threads 1] [--arms ...] [--out file])
"""

from __future__ import annotations

import sys

from benchmarks.peers import arena, supervised

ARMS = {"ours": ("benchmarks.peers.supervised_ours", "rm"), "trl": ("benchmarks.peers.supervised_trl", "rm")}

if __name__ == "__main__":
    sys.exit(arena.compare(ARMS, supervised.render, name="bench-rm", description=__doc__))
