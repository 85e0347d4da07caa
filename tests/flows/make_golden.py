"""Write the committed curve anew: ``python -m tests.flows.make_golden``, after a change that is meant to move it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.flows.conftest import run_flows
from tests.flows.test_post_train import GOLDEN, curve, machine

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        done = run_flows("run", Path(folder))
        sys.stderr.write(done.stderr)
        if done.returncode == 0:
            text = json.dumps({"machine": machine(), "curve": curve(Path(folder))}, indent=1)
            GOLDEN.write_text(text + "\n", encoding="utf-8")
    sys.exit(done.returncode)
