"""MLflow's check of passwords, which refuses what its check of permissions and its handlers read differently.

A DELETE names its subject in the address for the one and in the content for the other, unless the content is declared
as JSON: whoever may change one model could delete any other, its aliases and its tags. MLflow's settings name this
function. This module imports MLflow alone: the servers' image has no rlcore.
"""

from __future__ import annotations

from flask import Request, Response, request
from werkzeug.datastructures import Authorization


def authenticate() -> Authorization | Response:
    """Return the user of a request that both read alike; else an answer that refuses it."""
    from mlflow.server.auth import authenticate_request_basic_auth  # the server itself, of which this is a part

    if is_ambiguous(request):
        return Response("the content of a DELETE must be declared as application/json", status=400)
    found: Authorization | Response = authenticate_request_basic_auth()
    return found


def is_ambiguous(asked: Request) -> bool:
    """Return True for a DELETE whose content MLflow's handler takes for JSON although nothing says that it is."""
    return asked.method == "DELETE" and not asked.is_json and bool(asked.get_data())
