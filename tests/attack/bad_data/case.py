"""A faulty input as a value: the files that a data set is made of, and what has to become of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
Lines = Sequence[Row | bytes]
Contract = Literal["prompts", "demonstrations", "preference_pairs"]

OWN_ADAPTERS: Mapping[Contract, str] = {
    "prompts": "prompts",
    "demonstrations": "demonstrations",
    "preference_pairs": "preferences",
}


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """The row in ``line`` is set aside with a reason that has these words, and a field that begins so."""

    line: int
    field: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The data set is refused in words that have these."""

    words: str


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The data set is taken, and no training row has this text in its conversation."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Nothing is wrong, and every row is taken: a false alarm would be a fault of the gate."""


Expected = Quarantined | Refused | Apart | Sound


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input. ``prepare`` makes other files than ``lines``, and gives the path of the data set.

    ``evaluated``: questions that another data set evaluates on.
    """

    family: str
    name: str
    expected: Sequence[Expected]
    contract: Contract = "prompts"
    adapter: str = ""
    lines: Lines = ()
    eval_lines: Lines = ()
    evaluated: Sequence[str] = ()
    prepare: Callable[[Path], Path] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, Path | None]:
        """The files of the data set, and of its evaluation where that has its own."""
        if self.prepare:
            return self.prepare(folder), None
        held_out = write_lines(folder / "eval.jsonl", self.eval_lines) if self.eval_lines else None
        return write_lines(folder / "rows.jsonl", self.lines), held_out


def write_lines(path: Path, lines: Lines) -> Path:
    """A JSONL file; bytes are written as they are."""
    content = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join(content) + b"\n")
    return path


def ask(text: str, *before: str) -> list[dict[str, str]]:
    """A conversation that ends with a question; what was said before takes turns, the user first."""
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": said} for place, said in enumerate(before)]
    return [*turns, {"role": "user", "content": text}]


CONTRACTS: tuple[Contract, ...] = ("prompts", "demonstrations", "preference_pairs")
LOOSE: Mapping[str, Any] = {"max_quarantined": 1.0}

# Twelve questions that no word or number connects.
QUESTIONS = (
    "Which river flows through Vienna and Budapest?",
    "What is 31 * 4 + 17?",
    "Name the largest planet of our solar system.",
    "How many minutes are there in 7 hours?",
    "Who painted the ceiling of the Sistine Chapel?",
    "Translate 'good morning' into Portuguese, please.",
    "A farmer has 12 cows and sells 5 of them. How many cows remain?",
    "What gas do plants take out of the air?",
    "Solve 3x + 4 = 19 for x.",
    "Which metal is liquid at room temperature?",
    "In what year did the Berlin Wall come down?",
    "Spell the word 'necessary' backwards.",
)


def row(contract: Contract, name: str, question: str, **changes: Any) -> Row:
    """A sound row of a contract."""
    messages = ask(question)
    if contract == "prompts":
        made: Row = {"prompt_id": name, "messages": messages, "reference": "7", "task": "t"}
    elif contract == "demonstrations":
        made = {"demonstration_id": name, "messages": messages, "completion": f"It is {name}.", "reference": ""}
        made["task"] = "t"
    else:
        sides = {"chosen": f"It is {name}.", "rejected": f"Not {name}, sorry."}
        made = {"pair_id": name, "messages": messages, **sides, "source": "me"}
    return {**made, **changes}


def rows(contract: Contract, *, split: bool = False, skip: Iterable[int] = ()) -> list[Row]:
    """A sound row for each question, the last four of which are held out where rows are divided."""
    left = [place for place in range(len(QUESTIONS)) if place not in set(skip)]
    sides = [{"split": "train" if place < 8 else "eval"} if split else {} for place in left]
    return [row(contract, f"r{place}", QUESTIONS[place], **side) for place, side in zip(left, sides, strict=True)]
