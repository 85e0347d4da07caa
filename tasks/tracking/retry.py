"""Retries of MLflow calls while the database is locked or the server is unreachable."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from rlcore.errors import ServiceError, shown

if TYPE_CHECKING:
    from mlflow import MlflowClient


logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

MINUTES = 10.0  # seconds that a run waits; SQLite and MLflow's client wait up to half a minute before each try
_FIRST, _LONGEST = 1.0, 30.0  # seconds between tries
_REASONS = {
    "database is locked": "another process keeps MLflow's database locked",
    "database table is locked": "another process keeps MLflow's database locked",
    "Max retries exceeded": "MLflow's server does not answer",
    "Connection refused": "MLflow's server does not answer",
}

_REFUSALS = {"error code 401": "does not know the user", "error code 403": "does not allow this to the user"}


def retry_while_unavailable(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of ``call``, retrying while MLflow is unavailable.

    Raises:
        ServiceError: MLflow was unavailable for ten minutes, or refuses the user.
    """
    began, pause = time.monotonic(), _FIRST
    while True:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            reason = unavailable_reason(error)
            if not reason:
                _raise_if_refused(error)
                raise
        waited = time.monotonic() - began
        if waited > 60.0 * MINUTES:
            raise ServiceError(
                f"{reason}, for {waited / 60.0:.0f} minutes now",
                fix="end the process that locks it, or start the server, then rerun the command, which resumes",
            )
        logger.warning("%s: retry after %.0f s", reason, waited)
        time.sleep(pause)
        pause = min(2.0 * pause, _LONGEST)


def unavailable_reason(error: BaseException) -> str:
    """Return the reason why MLflow is unavailable for now; empty for any other error."""
    return next((words for sign, words in _REASONS.items() if sign in str(error)), "")


def _raise_if_refused(error: Exception) -> None:
    if refused := next((words for sign, words in _REFUSALS.items() if sign in str(error)), ""):
        user = os.environ.get("MLFLOW_TRACKING_USERNAME") or "nobody"
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to those of a user who may; the worker of a "
        fix += "deployment writes the registry of models"
        raise ServiceError(f"MLflow's server {refused} {user}: {shown(str(error))}", fix=fix) from error


def patient_client(client: MlflowClient) -> MlflowClient:
    """Return a client whose methods retry as :func:`retry_while_unavailable` does."""
    return cast("MlflowClient", _Patient(client))


class _Patient:
    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return functools.partial(retry_while_unavailable, found) if callable(found) else found


def none_if_missing(read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return the result of ``read``, or None if MLflow has no such thing."""
    from mlflow.exceptions import MlflowException

    try:
        return read(*args, **kwargs)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def ignore_existing(create: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call ``create``; ignore that the resource exists already, perhaps created concurrently."""
    from mlflow.exceptions import MlflowException

    try:
        create(*args, **kwargs)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
