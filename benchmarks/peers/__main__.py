"""A GRPO step of TRL and of rlcore: ``python -m benchmarks peers``."""

from __future__ import annotations

import sys

from benchmarks.peers.grpo import main

if __name__ == "__main__":
    sys.exit(main())
