"""Prefect worker that also corrects Prefect's records: ``python -m infra.worker`` with ``PREFECT_API_URL`` set.

It takes the options of ``prefect worker start``. A thread (``watch``) queues dead runs again, those of a worker with
its ``--name``: each machine needs a constant name of its own (default: the host name). Its runs outlive it
(``worker_output``).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from collections.abc import Sequence

POOL = "rlcore"


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM or Ctrl-C."""
    from prefect.cli import app

    from rlcore.tasks.run.reconciliation import watch
    from rlcore.tasks.store.settings import find_home

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pool", default=POOL)
    parser.add_argument("--name", default=socket.gethostname())
    known, others = parser.parse_known_args(arguments)
    options = {"pool": known.pool, "worker": known.name}
    threading.Thread(target=watch, args=(find_home(),), kwargs=options, name="reconciliation", daemon=True).start()
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS"] = "rlcore.tasks.run.worker_output.WorkerOutput"
    sys.argv[1:] = ["worker", "start", "--pool", known.pool, "--name", known.name, "--install-policy", "never", *others]
    app()


if __name__ == "__main__":
    main(sys.argv[1:])
