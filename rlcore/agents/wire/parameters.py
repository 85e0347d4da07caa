"""Parameters of requests: those that are ignored because the run decides, and those that are refused.

A parameter that is in neither table and that the gateway does not read is ignored with a warning in the log: clients
add parameters faster than agents change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from rlcore.agents.wire.conversation import Json
from rlcore.agents.wire.messages import wrong_type
from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError

logger = logging.getLogger(__name__)

DECIDED_BY_THE_RUN = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed"} | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
)
"""The recorded log-probabilities belong to the run's own distribution, whatever the agent wants."""

WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "reasoning", "verbosity"}
    | {"prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"truncation", "max_tool_calls", "moderation", "background_options", "access_programs", "image"}
)

_Test = Callable[[Any], bool]


def _is_plain_text(value: Any) -> bool:
    form = value.get("format", value) if isinstance(value, Mapping) else None
    return isinstance(form, Mapping) and form.get("type", "text") == "text"


REFUSED: Mapping[str, tuple[_Test, str]] = MappingProxyType(
    {
        "response_format": (_is_plain_text, "answers are not constrained: describe the form in a message"),
        "text": (_is_plain_text, "answers are not constrained: describe the form in a message"),
        "logit_bias": (lambda value: value == {}, "it would change the distribution that is trained: remove it"),
        "top_logprobs": (lambda value: value == 0, "only sampled tokens have log-probabilities: remove it"),
        "modalities": (lambda value: value == ["text"], "the policy reads and writes text: remove it"),
        "audio": (lambda value: False, "the policy reads and writes text: remove it"),
        "functions": (lambda value: value == [], "it is deprecated: declare them in tools"),
        "function_call": (lambda value: value in ("auto", "none"), "it is deprecated: use tool_choice"),
        "web_search_options": (lambda value: False, "there are no built-in tools: declare a function of your own"),
        "background": (lambda value: value is False, "answers are sampled at once: remove it"),
        "conversation": (lambda value: False, "send the items in input, or name previous_response_id"),
        "prompt": (lambda value: False, "stored prompts do not exist here: write it in instructions"),
        "context_management": (lambda value: value == [], "shorten the input in the agent: it is then a new branch"),
    }
)
"""Parameter, the values that have no effect, and the advice of the error."""


def check_parameters(body: Json, read: Collection[str]) -> None:
    """Refuse the parameters that cannot be served. ``read``: parameters that the caller reads.

    Raises:
        ApiError: Names the parameter.
    """
    known = {*read, *DECIDED_BY_THE_RUN, *WITHOUT_EFFECT}
    given = {name: value for name, value in body.items() if value is not None and name not in known}
    for name, (is_harmless, advice) in REFUSED.items():
        if name in given and not is_harmless(given[name]):
            raise ApiError(400, f"{name} is not supported: {advice}", code="unsupported_parameter", param=name)
    if unknown := [name for name in given if name not in REFUSED]:
        logger.warning("agent: ignored parameters=%s", shown(", ".join(unknown), max_chars=200))


def optional_int(body: Json, name: str, *, most: float = math.inf) -> int | None:
    """Return an integer parameter, or None if absent.

    Raises:
        ApiError: It is no integer, too small or too large.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise wrong_type(value, name, "an integer from 1 on" if most == math.inf else f"an integer from 1 to {most}")
    return value


def flag(body: Json, name: str) -> bool:
    """Return a boolean parameter; False if absent.

    Raises:
        ApiError: It is no boolean.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(value, name, "true or false")
    return bool(value)


def may_call(body: Json) -> bool:
    """Return False for ``tool_choice = "none"``.

    A call that is required, or of a certain tool, cannot be enforced on the policy, so such a choice is ``auto``.

    Raises:
        ApiError: It is no choice of OpenAI's API.
    """
    value = body.get("tool_choice")
    if value is None or value in ("auto", "none", "required"):
        return value != "none"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("function", "allowed_tools"):
        return True
    what = f"tool_choice must be auto, none, required or a function, not {shown(value, max_chars=60)}"
    raise ApiError(400, what, code="unsupported_parameter", param="tool_choice")
