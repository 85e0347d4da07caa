"""MLflow's errors for missing and existing resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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
