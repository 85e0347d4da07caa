"""Classes as environments: their methods are tools, and arguments are checked by their schemas."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.environments import mcp_server
from rlcore.environments.base import ParsedCall, ToolOutput
from rlcore.environments.call_arguments import arguments_of, declaration_errors
from rlcore.environments.environment import EnvironmentPool, import_environment, to_text, wrap_environment
from rlcore.errors import ConfigError
from rlcore.types import Message, Prompt
from tests.rows import cases
from tests.waiting import LONG

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="go"),), token_ids=(3,), reference="", task="")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("abx", max_size=2) | st.sampled_from(["object", "array"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "enum", "properties", "required", "items", "anyOf", "oneOf", "x", "$ref", "nullable"]
            )
            | st.just("additionalProperties"),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


def declared(parameters: object, *, name: str = "move", description: object = "Moves.") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Board:
    """An environment that learns of its one tool only as it runs."""

    def __init__(self, *, schemas: Any) -> None: ...

    def reset(self, prompt: Prompt) -> None: ...

    @staticmethod
    def tool_schemas(*, schemas: Any) -> Any:
        return schemas

    def move(self, **arguments: Any) -> str:
        return repr(arguments)


def asked(parameters: object, arguments: Mapping[str, Any]) -> str:
    """Return the board's answer to a call, from schema to output."""
    worlds = EnvironmentPool(wrap_environment(Board, {"schemas": {"move": declared(parameters)}}), timeout_seconds=LONG)
    worlds.reset({0: PROMPT}, {0: (0, 0)})
    (answer,) = worlds.answer({0: ParsedCall(tool="move", arguments=arguments)}).values()
    worlds.close()
    assert isinstance(answer, ToolOutput)
    return answer.text


@pytest.mark.parametrize(("parameters", "arguments", "answer"), cases(__file__, "every_schema_that_json"))
def test_every_schema_that_json_schema_knows_can_be_called(
    parameters: object, arguments: Mapping[str, Any], answer: str
) -> None:
    assert answer in asked(parameters, arguments)


def nested(depth: int) -> object:
    schema: object = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"properties": {"deep": schema}}


@pytest.mark.parametrize(
    ("schemas", "fault"),
    [
        ({"move": declared({"properties": {"y": 7}})}, "move: parameters.y must be a schema"),
        ({"move": declared({"properties": {"y": None}})}, "move: parameters.y must be a schema"),
        ({"move": declared({"properties": ["y"]})}, "parameters.properties must be an object"),
        ({"move": declared({"properties": {"y": {"type": 7}}})}, "parameters.y.type must be the name"),
        ({"move": declared({"properties": {"y": {"type": [["a"]]}}})}, "parameters.y.type must be the name"),
        ({"move": declared({"properties": {"y": {"enum": 7}}})}, "parameters.y.enum must be a list"),
        ({"move": declared({"properties": {"y": {"anyOf": {}}}})}, "parameters.y.anyOf must be a list"),
        ({"move": declared({"properties": {"y": {"anyOf": [3]}}})}, "parameters.y.anyOf.0 must be a schema"),
        ({"move": declared({"properties": {"y": {"items": "text"}}})}, "parameters.y.items must be a schema"),
        ({"move": declared({"required": "y"})}, "parameters.required must be a list of names"),
        ({"move": declared({"additionalProperties": 3})}, "parameters.additionalProperties must be a schema"),
        ({"move": declared({"type": "string"})}, "parameters.type must be object, not string"),
        ({"move": declared(True)}, "its parameters must be the schema"),
        ({"move": declared(None)}, "its parameters must be the schema"),
        ({"move": declared({}, description=7)}, "its description must be a text"),
        ({"move": declared(nested(100))}, "nested more than 32 deep"),
        ({"move": declared({"properties": {"y": {"anyOf": [{}] * 1_000}}})}, "more than 1000 subschemas"),
        ({"move": declared({"properties": {"y": {"enum": list(range(10_001))}}})}, "10000 values of enumerations"),
        ({"move": declared(nested(5_000))}, "the tools of 'Board' cannot be"),  # how deep JSON goes is Python's choice
        ({"move": declared({"title": "\ud800"})}, "cannot be described"),
        ({"move": declared({"title": {1, 2}})}, "cannot be described"),
        ({"move": declared({"title": "x" * 2_000_000})}, "no prompt has room"),
        ({"move": 7}, "not declared as a function"),
        ({"move": declared({}, name="other")}, "not declared as a function"),
        ({"go\x1b[2J": declared({})}, r"'go\x1b[2J' is not a tool name"),
        ({"": declared({})}, "is not a tool name"),
        (7, "cannot be described"),
    ],
)
def test_a_schema_that_is_none_is_refused_at_the_start_with_its_tool_and_place(schemas: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        wrap_environment(Board, {"schemas": schemas}, where="episodes.environment")
    assert fault in str(refused.value) and refused.value.where == "episodes.environment"
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 2_000


@settings(max_examples=200, deadline=None)
@given(JSON, st.dictionaries(st.sampled_from("abx"), JSON, max_size=3), st.text("{}[]ab1", max_size=6))
def test_what_is_let_through_never_raises_at_a_call(parameters: Any, arguments: Any, text: str) -> None:
    if not declaration_errors("move", declared(parameters)):
        for named in (arguments, None):
            assert isinstance(arguments_of(parameters, text=text, named=named), str | dict)


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"x": math.nan}])
@pytest.mark.parametrize("schema", [{"type": "number"}, True])
def test_nan_and_infinity_are_no_arguments(value: Any, schema: Any) -> None:
    found = arguments_of({"properties": {"a": schema}}, text="", named={"a": value})
    assert isinstance(found, str) and "the arguments are no JSON" in found


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "[NaN]"])
def test_a_text_that_spells_no_number_is_a_text(text: str) -> None:
    assert arguments_of({"properties": {"a": {"type": "number"}}}, text=text, named=None) == "a must be of type number"
    assert arguments_of({"properties": {"a": {"type": "string"}}}, text=text, named=None) == {"a": text}


def test_the_tools_of_an_mcp_server_are_checked_where_its_session_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listed(server: object) -> list[Any]:
        tool = {"name": "move", "description": None, "input_schema": {"properties": {"y": True, "z": "text"}}}
        return [SimpleNamespace(**tool)]

    monkeypatch.setattr(mcp_server, "_listed", listed)
    with pytest.raises(ConfigError, match=r"move: parameters.z must be a schema"):
        import_environment("rlcore.environments.mcp_server:McpServer", {"command": "a server of strange schemas"})


class Guess:
    def __init__(self, high: int = 9) -> None:
        self.high = high

    def reset(self, prompt: Prompt) -> None: ...

    def guess(self, number: int) -> str:
        """Says whether the number is higher or lower.

        Args:
            number: your guess
        """
        raise NotImplementedError

    def get_reward(self) -> float:
        return 1.0

    def _hidden(self) -> None: ...


GAME = f"{__name__}:Guess"


class Shelf:
    """Several kinds of arguments."""

    def reset(self, prompt: Prompt, rng: random.Random) -> str: ...

    def find(self, words: list[str], limit: int | None = None, order: Literal["up", "down"] = "up") -> dict[str, Any]:
        """Finds books.

        Args:
            words: what is looked for
            limit: how many at most
            order: which way
        """
        raise NotImplementedError

    @staticmethod
    def open_hours() -> str:
        """Says when it is open."""
        raise NotImplementedError


def test_public_methods_are_tools_described_by_their_hints_and_docstrings() -> None:
    found = import_environment(GAME, {"high": 5})
    assert list(found.schemas) == ["guess"]
    assert found.schemas["guess"] == {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Says whether the number is higher or lower.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "your guess"}},
                "required": ["number"],
            },
        },
    }
    assert (found.make().high, found.takes_rng, found.has_reward) == (5, False, True)
    shelf = wrap_environment(Shelf, {})
    assert (set(shelf.schemas), shelf.takes_rng, shelf.has_reward) == ({"find", "open_hours"}, True, False)


class Untyped:
    def reset(self, prompt: Prompt) -> None: ...

    def look(self, where):  # type: ignore[no-untyped-def]
        """Looks."""


class Undescribed:
    def reset(self, prompt: Prompt) -> None: ...

    def look(self, where: str) -> str:
        """Looks."""
        return where


class Toolless:
    def reset(self, prompt: Prompt) -> None: ...


@pytest.mark.parametrize(
    ("found", "options", "message"),
    [
        (Untyped, {}, r"Untyped\.look is a tool that cannot be described"),
        (Undescribed, {}, "no description for the argument 'where'"),
        (Toolless, {}, "has no tool"),
        (Toolless, {"high": 1}, "cannot be constructed with these options"),
        (len, {}, "not a class with a method reset"),
        (int, {}, "not a class with a method reset"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_with_the_reason(
    found: Any, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap_environment(found, options)


@pytest.mark.parametrize("name", ["no_such_module:Guess", f"{__name__}:Absent"])
def test_a_class_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot import the environment") as caught:
        import_environment(name, {}, where="stages.grpo.sampling.episodes.environment")
    assert caught.value.where == "stages.grpo.sampling.episodes.environment"


@pytest.mark.parametrize(
    ("text", "named", "expected"),
    [
        ("5", None, {"number": 5}), ('{"number": 5}', None, {"number": 5}), ("", {"number": 5}, {"number": 5}),
        ("five", None, "number must be of type integer"), ("5.5", None, "number must be of type integer"),
        ("true", None, "number must be of type integer"), ("", {"number": "5"}, "number must be of type integer"),
        ("", {}, "the argument 'number' is missing"),
        ("", {"number": 5, "secret": 1}, "there is no argument 'secret', only number"),
        ("[" * 100_000, None, "number must be of type integer"),
    ],
)  # fmt: skip
def test_arguments_are_taken_by_name_or_as_the_one_text(
    text: str, named: Mapping[str, Any] | None, expected: Any
) -> None:
    parameters = wrap_environment(Guess, {}).parameters_of("guess")
    assert arguments_of(parameters, text=text, named=named) == expected


def test_a_tool_with_several_arguments_takes_an_object_and_one_with_none_takes_nothing() -> None:
    shelf = wrap_environment(Shelf, {})
    find, hours = shelf.parameters_of("find"), shelf.parameters_of("open_hours")
    assert arguments_of(find, text='{"words": ["a"], "limit": null}', named=None) == {"words": ["a"], "limit": None}
    assert arguments_of(find, text="a", named=None) == "the arguments are a JSON object of words, limit, order"
    assert arguments_of(find, text="", named={"words": ["a", 1]}) == "words must be of type array"
    assert arguments_of(find, text="", named={"words": [], "order": "left"}) == "order must be one of up, down"
    assert arguments_of(hours, text="", named=None) == {}
    assert arguments_of(hours, text="now", named=None) == "it takes no argument"


def test_what_a_tool_gives_is_read_as_text() -> None:
    assert [to_text(each) for each in ("two", 2, None, {"ä": [1.5, True]})] == ["two", "2", "", '{"ä": [1.5, true]}']
