"""A gloo group of a trainer (rank 0) and an engine's workers, beside all other groups of torch.distributed.

The members meet at a store. The trainer opens it on the one interface by which the engine reaches it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

distributed: Any = torch.distributed  # the stores and the options of a group are not in what it says it exports
_LONGEST = timedelta(seconds=300.0)  # to meet, and of one tensor


def own_address(peer: tuple[str, int]) -> str:
    """This machine's address on the way to ``peer``; for a peer on this machine, that of the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def open_store(host: str, size: int) -> Any:
    """The meeting place of ``size`` members, on a free port of the address ``host`` alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        host, port, size, is_master=True, timeout=_LONGEST, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int, size: int) -> Any:
    """The meeting place that the trainer opened."""
    return distributed.TCPStore(host, port, size, is_master=False, timeout=_LONGEST, wait_for_workers=False)


def join_group(store: Any, rank: int, size: int, *, host: str) -> Any:
    """Become member ``rank``, and return when all have met.

    Raises:
        RuntimeError: some did not come within five minutes.
    """
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _LONGEST
    return distributed.ProcessGroupGloo(distributed.PrefixStore("weights", store), rank, size, options)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send ``tensor`` from rank 0 to all others, where it is received in place.

    Raises:
        RuntimeError: a member is gone.
    """
    group.broadcast(tensor, 0).wait()
