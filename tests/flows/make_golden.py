"""Write the committed curve anew: ``python -m tests.flows.make_golden``, after a change that is meant to move it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.flows.conftest import run_flows
from tests.flows.golden import GOLDEN, STAGES, machine, record
from tests.flows.homes import folder

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        done = run_flows("run", Path(home))
        sys.stderr.write(done.stderr)
        if done.returncode == 0:
            found = record({stage: folder(Path(home), stage) for stage in STAGES})
            GOLDEN.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n", encoding="utf-8")
    sys.exit(done.returncode)
