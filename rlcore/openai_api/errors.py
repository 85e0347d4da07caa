"""Rejections in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Rejected request.

    Attributes:
        code: Word for programs; ``param``: name of the invalid parameter, or None.
        may_retry: True if an equal request can succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        may_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.may_retry = status, message, code, param, may_retry

    @property
    def body(self) -> dict[str, Any]:
        """Error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """HTTP response. OpenAI's clients repeat a request only if ``x-should-retry`` is true."""
        headers = {"x-should-retry": str(self.may_retry).lower()}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers | ({"Retry-After": "1"} if self.may_retry else {}))
