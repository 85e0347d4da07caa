"""The machine's speed at nothing but matrix products, as one line of JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.floor import peak_flops

if __name__ == "__main__":
    sys.stdout.write(json.dumps({"gflops": peak_flops() / 1e9}) + "\n")
