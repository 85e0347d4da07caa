"""MLflow's check of passwords, named in its settings. The servers' image has this file, and no rlcore."""

from __future__ import annotations

from flask import Request, Response, request
from werkzeug.datastructures import Authorization


def authenticate() -> Authorization | Response:
    """Return the user of a request, or an answer that refuses it."""
    from mlflow.server.auth import authenticate_request_basic_auth  # the server itself, of which this is a part

    if is_ambiguous(request):
        return Response("the content of a DELETE must be declared as application/json", status=400)
    found: Authorization | Response = authenticate_request_basic_auth()
    return found


def is_ambiguous(asked: Request) -> bool:
    """Return True if MLflow's check of permissions and its handler read a request differently."""
    # The check takes the subject of a DELETE from the address unless the content is declared as JSON, the handler from
    # the content always: whoever may change one model could delete any other, its aliases and its tags.
    return asked.method == "DELETE" and not asked.is_json and bool(asked.get_data())
