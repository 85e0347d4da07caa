"""A rank as a child process: ``python -m rlcore.distributed.rank_process DESCRIPTOR PARENT``.

It receives its setup and then requests over a pipe, in the same order as the other ranks. It ends with its parent.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlcore.distributed.rank import open_rank
from rlcore.distributed.serialization import decode, encode, encode_error

_POLL_SECONDS = 0.5


def main() -> None:
    """Serve requests until the pipe is closed."""
    end, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends the ranks in order
    setup = decode(end.recv_bytes())
    folder = Path(setup["folder"])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    serve(end, setup)
    _end_with(parent, folder)  # a living parent ends this process itself


def serve(end: Connection, setup: Mapping[str, Any]) -> None:
    """Open the rank of ``setup``, and answer requests from ``end`` until it is closed.

    A request is (method, arguments, settings); :meth:`rlcore.distributed.rank.Rank.answer` gives the answers.
    """
    try:
        with open_rank(setup) as rank:
            end.send_bytes(encode(rank.facts()))
            while (request := _next(end)) is not None:
                end.send_bytes(encode(rank.answer(*request)))
    except Exception as error:  # noqa: BLE001 - sent to the caller
        end.send_bytes(encode(encode_error(error)))


def _next(end: Connection) -> Any:
    try:
        return decode(end.recv_bytes())
    except EOFError:
        return None


def _end_with(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
