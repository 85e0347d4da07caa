"""What do three steps of SFT cost, in TRL and here? The work: :mod:`benchmarks.peers.supervised`.

make bench-sft        (python -m benchmarks.peers.sft_trl [--rounds 3] [--threads 1] [--arms ...] [--out file])

TRL with and without packing of several examples into a row.
"""

from __future__ import annotations

import sys

from benchmarks.peers import arena, supervised

ARMS = {
    "ours": ("benchmarks.peers.supervised_ours", "sft"),
    "trl": ("benchmarks.peers.supervised_trl", "sft"),
    "trl packed": ("benchmarks.peers.supervised_trl", "sft-packed"),
}

if __name__ == "__main__":
    sys.exit(arena.compare(ARMS, supervised.render, name="bench-sft", description=__doc__))
