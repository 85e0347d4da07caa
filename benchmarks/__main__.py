"""Command line: ``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME [options]`` runs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers/bin/python"
BENCHMARKS = {
    "peers": "speed and memory against TRL on equal work: headline (20 minutes) or supervised (30)",
    "evidence": "claims of textbooks about online RL, on a real model and the tiny task (hours; resumes; --print)",
    "promotion": "errors and power of the promotion gate (10 minutes)",
    "canaries": "sound syncs that the sync canary stops, and faults that it finds (5 minutes)",
    "faults": "silent faults, one at a time, in small runs (10 minutes), or --sound runs (an hour)",
    "gate": "rows per processor second and memory of the data gate (2 minutes)",
}


def main(arguments: Sequence[str]) -> int:
    """List the benchmarks, or run the named one in this process."""
    if not arguments:
        print("python -m benchmarks NAME [--help | options]\n")
        print("\n".join(f"  {name:<10} {text}" for name, text in BENCHMARKS.items()))
        return 0
    name, *options = arguments
    if name not in BENCHMARKS:
        sys.stderr.write(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}\n")
        return 2
    python = PEERS if name == "peers" else Path(sys.executable)
    if not python.exists():
        sys.stderr.write(f"{python} is missing: infra/install_peers.sh makes it\n")
        return 2
    os.chdir(ROOT)
    return os.execv(python, [str(python), "-m", f"benchmarks.{name}", *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
