"""Gloo group of a trainer (rank 0) and an engine's workers, separate from other torch.distributed groups.

The members meet at a store, which the trainer opens on the interface by which the engine reaches it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

distributed: Any = torch.distributed  # stores and group options are missing in its declared exports
_TIMEOUT = timedelta(seconds=300.0)  # of the rendezvous and of one tensor


def own_address(peer: tuple[str, int]) -> str:
    """Return this machine's address on the route to ``peer``; the loopback address for a local peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def open_store(host: str, size: int) -> Any:
    """Open the rendezvous store of ``size`` members, on a free port of the address ``host`` only."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        host, port, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int, size: int) -> Any:
    """Connect to the store that the trainer opened."""
    return distributed.TCPStore(host, port, size, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)


def join_group(store: Any, rank: int, size: int, *, host: str) -> Any:
    """Join as member ``rank``, and return when all members have joined.

    Raises:
        RuntimeError: A member did not join within five minutes.
    """
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupGloo(distributed.PrefixStore("weights", store), rank, size, options)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send ``tensor`` from rank 0 to all other ranks, which receive it in place.

    Raises:
        RuntimeError: A member is gone.
    """
    group.broadcast(tensor, 0).wait()
