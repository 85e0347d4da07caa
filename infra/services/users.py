"""Users of MLflow's server besides its administrator: people who read, and people whose runs it keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

from infra.services.layout import Layout, clients
from rlcore.errors import ConfigError, ServiceError
from rlcore.tasks.operations.doctor import access_to
from rlcore.tasks.operations.server_access import USER
from rlcore.tasks.store.passwords import draw

_URI = "MLFLOW_TRACKING_URI"
_SECONDS = 30.0
# The worker and the administrator alone write the registry. People promote and roll back through deployments, which
# record it and need approvals.
RIGHTS: Mapping[str, Mapping[str, str]] = {
    "read": {"experiment": "READ", "registered_model": "READ"},
    "run": {"experiment": "EDIT", "registered_model": "READ"},
}
NOTHING = "nothing"


def set_user(layout: Layout, name: str, may: str) -> str:
    """Give a person a new password and the rights ``may``; return lines for their shell, the only copy of the password.

    The server is the one that ``MLFLOW_TRACKING_URI`` names, with the administrator's password, else the services' own.
    Raises:
        ConfigError: the name is the administrator's.
        ServiceError: the server refuses, or does not answer.
    """
    if name == USER:
        raise ConfigError(f"{USER} is the administrator, as whom the worker logs in", fix="choose another name")
    if not os.environ.get(_URI, "").startswith("http"):
        os.environ |= clients(layout)
    if may == NOTHING:
        _send("DELETE", "2.0/mlflow/users/delete", {"username": name})
        return f"{name} is no user of {os.environ[_URI]} any more\n"
    login = {"username": name, "password": draw()}
    if not _send("POST", "2.0/mlflow/users/create", login, unless="RESOURCE_ALREADY_EXISTS"):
        _send("PATCH", "2.0/mlflow/users/update-password", login)
    for kind, permission in RIGHTS[may].items():
        grant = {"username": name, "resource_type": kind, "resource_id": "*"}
        _send("POST", "3.0/mlflow/users/permissions/revoke", grant, unless="RESOURCE_DOES_NOT_EXIST")
        _send("POST", "3.0/mlflow/users/permissions/grant", {**grant, "permission": permission})
    variables = {
        _URI: os.environ[_URI],
        "MLFLOW_TRACKING_USERNAME": name,
        "MLFLOW_TRACKING_PASSWORD": login["password"],
    }
    return "".join(f"export {variable}={value}\n" for variable, value in variables.items())


def _send(method: str, path: str, content: Mapping[str, Any], *, unless: str = "") -> bool:
    """Send a change as the administrator; return False on the error ``unless``."""
    url = f"{os.environ[_URI].rstrip('/')}/api/{path}"
    try:
        answer = httpx.request(method, url, json=dict(content), timeout=_SECONDS, **access_to("MLflow"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceError(f"MLflow's server does not answer: {error}", where=url, fix="start it") from error
    if unless and unless in answer.text:
        return False
    if not answer.is_success:
        fix = "log in as its administrator: source clients.env"
        raise ServiceError(f"MLflow refuses ({answer.status_code}): {answer.text[:300]}", where=url, fix=fix)
    return True
