"""One side of a comparison in its own process: ``python -m benchmarks.peers.arm ours|trl WORK SETTING``, in JSON.

The last line of its output is the record.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from benchmarks.peers.record import Record
from benchmarks.peers.work import Work


def main(side: str, work: str, setting: str) -> None:
    task = Work(**json.loads(work))
    getattr(import_module(f"benchmarks.peers.{side}"), task.task)(task, Record(task), **json.loads(setting))


if __name__ == "__main__":
    main(*sys.argv[1:])
