"""Two of MLflow's errors are answers; every other one is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from rlcore.tasks.tracking.retry import ignore_existing, none_if_missing


def refusing(code: int) -> Callable[..., str]:
    def refuse(name: str) -> str:
        raise MlflowException(f"{name} is refused", error_code=code)

    return refuse


def test_what_is_there_is_given_and_what_is_not_is_none() -> None:
    assert none_if_missing(str.upper, "name") == "NAME"
    assert none_if_missing(refusing(RESOURCE_DOES_NOT_EXIST), "name") is None


def test_what_exists_already_need_not_be_made() -> None:
    made: list[str] = []
    ignore_existing(made.append, "name")
    ignore_existing(refusing(RESOURCE_ALREADY_EXISTS), name="name")
    assert made == ["name"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (none_if_missing, RESOURCE_ALREADY_EXISTS),
        (none_if_missing, INTERNAL_ERROR),
        (ignore_existing, RESOURCE_DOES_NOT_EXIST),
        (ignore_existing, INTERNAL_ERROR),
    ],
)
def test_any_other_error_is_raised(call: Callable[..., object], code: int) -> None:
    with pytest.raises(MlflowException, match="name is refused"):
        call(refusing(code), "name")
