"""A rank as a child process: ``python -m rlcore.distributed.rank_process DESCRIPTOR PARENT``, started by a group alone.

It is told over a pipe what to be, then does what it is asked, one request after another, as its fellows do. It ends
with the process that started it, however that one ends.
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
    """Be a rank until the pipe is closed."""
    end, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends the ranks in order
    setup = decode(end.recv_bytes())
    folder = Path(setup["folder"])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    serve(end, setup)
    _end_with(parent, folder)  # a parent that is there ends this process itself


def serve(end: Connection, setup: Mapping[str, Any]) -> None:
    """Be what ``setup`` says, and answer requests from ``end`` until it is closed.

    A request is (method, arguments, settings); the answers are those of :meth:`rlcore.distributed.rank.Rank.answer`.
    """
    try:
        with open_rank(setup) as rank:
            end.send_bytes(encode(rank.facts()))
            while (request := _next(end)) is not None:
                end.send_bytes(encode(rank.answer(*request)))
    except Exception as error:  # noqa: BLE001 - told to who asked
        end.send_bytes(encode(encode_error(error)))


def _next(end: Connection) -> Any:
    """The next request; None where there is none any more."""
    try:
        return decode(end.recv_bytes())
    except EOFError:
        return None


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent is gone, which cannot clean up any more."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
