"""What does one PPO iteration hold, in multiples of its model? Work ``smollm2`` of :mod:`benchmarks.peers.ppo_work`.

    make bench-ppo-memory        (python -m benchmarks.peers.ppo_memory --rounds 1)

Times of this work mean little: it has few tokens, so that weights and not activations are what is held.
"""

from __future__ import annotations

import sys

from benchmarks.peers import ppo

if __name__ == "__main__":
    sys.exit(ppo.run("smollm2", name="bench-ppo-memory", description=__doc__))
