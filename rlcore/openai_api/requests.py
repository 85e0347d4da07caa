"""Requests of OpenAI's protocol: strict JSON, fields by their types, and the parameters that all servers read alike.

fields = read_fields(read_json(body), OFFER)   # refuses what the server does not offer
options, messages = chat_options(fields), list(chat_messages(fields))
fields.end()                                   # refuses, or ignores, what nothing has read
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse

from rlcore.errors import shown
from rlcore.types import Role


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
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """HTTP response; OpenAI's clients repeat a request only if ``x-should-retry`` is true."""
        headers = {"x-should-retry": str(self.may_retry).lower()}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers | ({"Retry-After": "1"} if self.may_retry else {}))


logger = logging.getLogger(__name__)
Json = Mapping[str, Any]
Harmless = Callable[[Any], bool]
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_TOKENS = 2**31 - 1  # that a request may name
MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARS = 1000
_MAX_DEPTH = 32
_MAX_VALUES = 200_000  # Python needs a second for a few million of them
_MAX_ITEMS = 4096  # of a list
_MAX_SEED = 2**63 - 1
_COLDEST = 0.01  # a lower temperature equals greedy, and its logits would overflow
_DEFAULT_TOKENS = 16  # of a text completion
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # and where the text is
SPOKEN: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES: Mapping[str, Role] = {**SPOKEN, "tool": "tool", "function": "tool"}


def only(*values: object) -> Harmless:
    """Return a test for these values; true is not 1."""
    return lambda value: any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def is_plain_text(value: Any) -> bool:
    """Return True for a format of answers without constraints."""
    form = value.get("format", value) if isinstance(value, Mapping) else None
    return isinstance(form, Mapping) and form.get("type", "text") == "text"


UNSUPPORTED: Mapping[str, tuple[Harmless, str]] = MappingProxyType(
    {
        "response_format": (is_plain_text, "answers are not constrained, so describe the form in a message"),
        "logit_bias": (only({}), "it would change the distribution, so remove it"),
        "modalities": (only(["text"]), "the policy reads and writes text, so remove it"),
        "audio": (only(), "the policy reads and writes text, so remove it"),
        "functions": (only([]), "it is deprecated, so declare them in tools"),
        "function_call": (only("auto", "none"), "it is deprecated, so use tool_choice"),
        "web_search_options": (only(), "there are no built-in tools, so declare a function of your own"),
    }
)
"""Parameters that no server offers: the values that have no effect, and the advice of the error."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Part of the protocol that a server offers.

    Attributes:
        max_choices: Completions of a request; ``max_stops``: stop strings.
        model: Name for requests without one; "" if they need one.
        refused: Refused unless their value has no effect, as in :data:`UNSUPPORTED`.
        ignored: Have no effect.
        ignores_unknown: Ignore others with a warning, instead of refusing them.
    """

    max_choices: int
    max_stops: int
    model: str = ""
    refused: Mapping[str, tuple[Harmless, str]]
    ignored: Collection[str] = ()
    ignores_unknown: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Parameters that all requests for completions share.

    Attributes:
        temperature: 0 is greedy.
        stop: Texts that end a completion, excluded.
        top_logprobs: Likeliest tokens beside each token's; None: no logprobs.
        include_usage: In the last chunk of a stream.
    """

    model: str
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False


class Fields:
    """Fields of a JSON object, read by their types; null means absent.

    ``where``: path in the request, "" for the whole.
    """

    def __init__(self, value: object, offer: Offer, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise wrong_type(value, where, "an object")
        self.offer, self.where, self._read = offer, where, set[str]()
        self._values = {name: each for name, each in value.items() if each is not None}

    def path(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field

    def has(self, *fields: str) -> bool:
        return not self._values.keys().isdisjoint(fields)

    def value(self, field: str) -> Any:
        """Return any value, None if absent."""
        self._read.add(field)
        return self._values.get(field)

    def text(self, field: str) -> str:
        """Return a text, "" if absent."""
        return self._checked(field, "a text", lambda value: isinstance(value, str)) or ""

    def flag(self, field: str) -> bool:
        """Return a boolean, False if absent."""
        return bool(self._checked(field, "true or false", lambda value: isinstance(value, bool)))

    def integer(self, field: str, least: int, most: int) -> int | None:
        """Return an integer within a range, None if absent."""
        wanted = f"an integer from {least} to {most}"
        found: int | None = self._checked(field, wanted, lambda value: type(value) is int and least <= value <= most)
        return found

    def number(self, field: str, least: float, most: float) -> float | None:
        """Return a number within a range, None if absent."""
        wanted = f"a number from {least:g} to {most:g}"
        found: float | None = self._checked(
            field, wanted, lambda value: type(value) in (int, float) and least <= value <= most
        )
        return found

    def json_object(self, field: str) -> Json:
        """Return an unread object, empty if absent."""
        return self._checked(field, "an object", lambda value: isinstance(value, Mapping)) or {}

    def fields(self, field: str) -> Fields:
        """Return the fields of an object, none if absent."""
        return Fields(self.json_object(field), self.offer, self.path(field))

    def items(self, field: str, most: int = _MAX_ITEMS) -> Sequence[Any]:
        """Return a list of limited length, empty if absent."""
        found = self._checked(field, "a list", lambda value: isinstance(value, list)) or []
        return _short_list(found, self.path(field), most)

    def objects(self, field: str, most: int = _MAX_ITEMS) -> Iterator[Fields]:
        """Yield the fields of each object of a list."""
        for number, each in enumerate(self.items(field, most)):
            yield Fields(each, self.offer, f"{self.path(field)}[{number}]")

    @property
    def model(self) -> str:
        """Name of the model.

        Raises:
            ApiError: It is missing where the server needs one.
        """
        if not (name := self.text("model") or self.offer.model):
            raise self.missing("model")
        return name

    def missing(self, field: str) -> ApiError:
        name = self.path(field)
        return ApiError(400, f"{name} is missing", code="missing_required_parameter", param=name)

    def end(self) -> None:
        """Refuse the fields that nothing has read, or log that they are ignored, as the server does."""
        unknown = [self.path(name) for name in self._values if name not in self._read]
        if unknown and self.offer.ignores_unknown:
            logger.warning("ignored parameters=%s", shown(", ".join(unknown), max_chars=200))
        elif unknown:
            name = shown(unknown[0], max_chars=80)
            raise ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)

    def _checked(self, field: str, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.value(field)
        if value is not None and not is_right(value):
            raise wrong_type(value, self.path(field), wanted)
        return value


def wrong_type(value: object, param: str, wanted: str) -> ApiError:
    """Return the error of a value that is not ``wanted``."""
    return ApiError(400, f"{param} must be {wanted}, not {shown(value, max_chars=60)}", param=param)


def read_fields(body: Json, offer: Offer) -> Fields:
    """Return the parameters of a request, without those that have no effect.

    Raises:
        ApiError: One is not supported with its value.
    """
    for name, (is_harmless, advice) in offer.refused.items():
        if body.get(name) is not None and not is_harmless(body[name]):
            raise ApiError(400, f"{name} is not supported: {advice}", code="unsupported_parameter", param=name)
    return Fields({key: body[key] for key in body if key not in offer.refused and key not in offer.ignored}, offer)


def options_of(fields: Fields, *, is_chat: bool) -> Options:
    """Return the options of a chat or a text completion. Of two limits on tokens the lower one holds.

    Raises:
        ApiError: A parameter is invalid.
    """
    names = ("max_tokens", "max_completion_tokens") if is_chat else ("max_tokens",)
    limits = [limit for name in names if (limit := fields.integer(name, 1, MAX_TOKENS))]
    stream, streaming = fields.flag("stream"), fields.fields("stream_options")
    include_usage = streaming.flag("include_usage")
    streaming.end()
    if fields.has("stream_options") and not stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    fields.text("user")
    temperature, seed = fields.number("temperature", 0, 2), fields.integer("seed", -_MAX_SEED, _MAX_SEED)
    return Options(
        model=fields.model,
        max_tokens=min(limits, default=None if is_chat else _DEFAULT_TOKENS),
        n=fields.integer("n", 1, fields.offer.max_choices) or 1,
        temperature=1.0 if temperature is None else max(float(temperature), _COLDEST) if temperature else 0.0,
        seed=secrets.randbits(63) if seed is None else seed,
        stop=_stops(fields),
        top_logprobs=_top_logprobs(fields) if is_chat else fields.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        stream=stream,
        include_usage=include_usage,
    )


def _top_logprobs(fields: Fields) -> int | None:
    top, has_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS), fields.flag("logprobs")
    if top and not has_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if has_logprobs else None


def _stops(fields: Fields) -> tuple[str, ...]:
    value, most = fields.value("stop"), fields.offer.max_stops
    stops = [value] if isinstance(value, str) else fields.items("stop", most)
    if not all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARS for each in stops):
        wanted = f"a text or up to {most} texts, each of 1 to {MAX_STOP_CHARS} characters"
        raise wrong_type(value, "stop", wanted)
    return tuple(stops)


def chat_messages(fields: Fields, roles: Mapping[str, Role]) -> Iterator[tuple[Role, str, Fields]]:
    """Yield the role, the text and the fields of each message.

    Raises:
        ApiError: There is none, or one has an unknown role or no text.
    """
    if not fields.items("messages"):
        raise ApiError(400, "messages is empty", param="messages")
    for message in fields.objects("messages"):
        role, content = role_of(message, roles), message.value("content")
        if content in (None, []) and not message.has("tool_calls", "refusal"):
            raise message.missing("content")
        yield role, text_of(content, message.path("content")), message


def role_of(message: Fields, roles: Mapping[str, Role]) -> Role:
    """Return the role of a message.

    Raises:
        ApiError: It is none of the ``roles``.
    """
    name = message.text("role")
    if name not in roles:
        what = f"{message.path('role')} is {shown(name, max_chars=60)}, not one of the roles {', '.join(roles)}"
        raise ApiError(400, what, param=message.path("role"))
    return roles[name]


def text_of(content: object, param: str) -> str:
    """Return a text, or the joined texts of a list of parts; "" if absent.

    Raises:
        ApiError: It has a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_type(content, param, "a text or a list of texts")
    return "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(_short_list(content, param, _MAX_ITEMS)))


def completion_prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a text completion, each a text or token ids.

    Raises:
        ApiError: There is none, too many, or something else.
    """
    value, most = fields.value("prompt"), fields.offer.max_choices
    if value is None:
        raise fields.missing("prompt")
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    is_list = isinstance(prompts, list) and 0 < len(prompts) <= most
    if not is_list or not all(isinstance(each, str) or _are_ids(each) for each in prompts):
        raise wrong_type(value, "prompt", f"a text or token ids, or a list of up to {most} of them")
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompts)


def _short_list(found: Sequence[Any], param: str, most: int) -> Sequence[Any]:
    if len(found) > most:
        raise ApiError(400, f"{param} has {len(found)} entries, and the limit is {most}", param=param)
    return found


def _part(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _PARTS:
        what = f"{param} has the type {shown(kind, max_chars=60)}: the policy reads text only, so send its text"
        raise ApiError(400, what, code="unsupported_content", param=param)
    text = part.get(_PARTS[kind])
    if not isinstance(text, str):
        raise wrong_type(text, f"{param}.{_PARTS[kind]}", "a text")
    return text


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a body into an object: UTF-8, unique keys, no NaN, no lone surrogates, limited depth and number of values.

    Raises:
        ApiError: The body is invalid.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > _MAX_VALUES:
        raise _invalid(f"the body has more than {_MAX_VALUES} values")
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is invalid JSON: {shown(str(error).partition(';')[0])}") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    if not _is_shallow(value, _MAX_DEPTH):
        raise _invalid(f"the body is nested more than {_MAX_DEPTH} levels deep")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def _is_shallow(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


def _invalid(what: str) -> ApiError:
    return ApiError(400, what, code="invalid_json")
