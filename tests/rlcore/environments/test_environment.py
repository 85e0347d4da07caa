"""A user's class as an environment: its tools are described, its options checked, and arguments held against types."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from rlcore.environments.call_arguments import arguments_of
from rlcore.environments.environment import import_environment, to_text, wrap_environment
from rlcore.errors import ConfigError
from rlcore.types import Prompt

GUESS = '''
class Guess:
    def __init__(self, high: int = 9) -> None:
        self.high = high

    def reset(self, prompt):
        self.number = int(prompt.reference)

    def guess(self, number: int) -> str:
        """Says whether the number is higher or lower.

        Args:
            number: your guess
        """
        return "right" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return 1.0

    def _hidden(self) -> None: ...
'''


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


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_game.py").write_text(GUESS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_game:Guess"


def test_public_methods_are_tools_described_by_their_hints_and_docstrings(game: str) -> None:
    found = import_environment(game, {"high": 5})
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


@pytest.mark.parametrize("name", ["no_such_module:Guess", "my_game:Absent"])
def test_a_class_that_cannot_be_imported_is_named(name: str, game: str) -> None:
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
    game: str, text: str, named: Mapping[str, Any] | None, expected: Any
) -> None:
    parameters = import_environment(game, {}).parameters_of("guess")
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
