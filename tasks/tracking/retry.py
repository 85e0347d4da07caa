"""Waits for MLflow while its database is locked by another process, or its server is away, and says so."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from rlcore.errors import ServiceError

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

MINUTES = 10.0  # that a run waits; SQLite and MLflow's own client have waited up to half a minute before each try
_FIRST, _LONGEST = 1.0, 30.0  # seconds between tries
_REASONS = {
    "database is locked": "another process keeps MLflow's database locked",
    "database table is locked": "another process keeps MLflow's database locked",
    "Max retries exceeded": "MLflow's server does not answer",
    "Connection refused": "MLflow's server does not answer",
}


def retry_while_unavailable(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of ``call``, retrying while MLflow cannot be reached.

    Raises:
        ServiceError: it could not be reached for ten minutes.
    """
    began = time.monotonic()
    for pause in _pauses():
        try:
            return call(*args, **kwargs)
        except Exception as error:
            reason = unavailable_reason(error)
            if not reason:
                raise
        waited = time.monotonic() - began
        if waited > 60.0 * MINUTES:
            break
        logger.warning("%s: waiting for it, for %.0f s so far", reason, waited)
        time.sleep(pause)
    raise ServiceError(
        f"{reason}, for {waited / 60.0:.0f} minutes now",
        fix="end what keeps it, or start the server, then start the same command again: it goes on where it was",
    )


def unavailable_reason(error: BaseException) -> str:
    """Return why MLflow cannot be reached for now, as text; empty for any other error."""
    text = str(error)
    return next((words for sign, words in _REASONS.items() if sign in text), "")


def patient_client(client: MlflowClient) -> MlflowClient:
    """The client, every method of which waits as :func:`retry_while_unavailable` does."""
    return cast("MlflowClient", _Patient(client))


class _Patient:
    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return functools.partial(retry_while_unavailable, found) if callable(found) else found


def _pauses() -> Iterator[float]:
    pause = _FIRST
    while True:
        yield pause
        pause = min(2.0 * pause, _LONGEST)
