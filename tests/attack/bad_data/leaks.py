"""Questions that are evaluated on and trained on, typed in another way; and questions that only look so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.attack.bad_data.case import (
    ACCENTED,
    CONTRACTS,
    FARMER,
    LOOSE,
    TYPED,
    Apart,
    Case,
    Contract,
    Expected,
    Quarantined,
    Refused,
    Row,
    Sound,
    ask,
    row,
    rows,
)

NEAR, HISTORY = "is nearly a prompt that is evaluated on", "has an evaluation prompt in its history"


def cases() -> Iterator[Case]:
    yield from _typed_leaks()
    yield from _near_leaks()
    yield from _histories()
    yield from _what_must_stay_apart()


def _typed_leaks() -> Iterator[Case]:
    for name, typed in TYPED.items():
        for contract in CONTRACTS:
            question = ACCENTED if name == "decomposed accents" else FARMER
            train = [*rows(contract, split=True, skip=[6])[:7], row(contract, "leak", typed(question), split="train")]
            held_out = row(contract, "held", question, split="eval")
            yield Case(
                family="a leak typed in another way",
                name=f"{name}, {contract}",
                contract=contract,
                lines=[*train, held_out],
                expected=[Refused(words="prompts both for training and held out: 1")],
            )
        yield _two_files("prompts", name, typed)
        yield _foreign("prompts", name, typed, split={"split": "train"})
        yield _foreign("demonstrations", name, typed, split={})


def _two_files(contract: Contract, name: str, typed: Any) -> Case:
    return Case(
        family="a leak typed in another way",
        name=f"{name}, a file for evaluation",
        contract=contract,
        lines=rows(contract),
        eval_lines=[row(contract, "held", typed(FARMER)), row(contract, "more", "Is the moon made of cheese?")],
        expected=[Refused(words="prompts both for training and held out: 1")],
    )


def _foreign(contract: Contract, name: str, typed: Any, *, split: Row) -> Case:
    """A question of ours is one that another data set evaluates on, there typed in another way."""
    lines = rows(contract, split=bool(split))
    expected: Expected = (
        Refused(words="training prompts that another dataset evaluates on: 1") if split else Apart(text="farmer has 12")
    )
    return Case(
        family="a leak into another data set",
        name=f"{name}, {'divided' if split else 'undivided'} {contract}",
        contract=contract,
        lines=lines,
        evaluated=[typed(FARMER)],
        expected=[expected],
    )


MORE_WORDS = {
    "a word before": lambda text: f"Well, {text}",
    "a word after": lambda text: f"{text[:-1]} exactly?",
    "a word within": lambda text: text.replace(" cows ", " brown cows ", 1),
    "a word less": lambda text: text.replace("them", "", 1),
    "please": lambda text: f"{text} Please",
    "a word more, typed in another way": lambda text: f"\u201cPlease\u201d {text.upper()}",
}


def _near_leaks() -> Iterator[Case]:
    for name, typed in MORE_WORDS.items():
        near = typed(FARMER)
        for contract in CONTRACTS:
            train = [*rows(contract, split=True, skip=[6])[:7], row(contract, "leak", near, split="train")]
            yield Case(
                family="one word more",
                name=f"{name}, {contract}",
                contract=contract,
                lines=[*train, row(contract, "held", FARMER, split="eval")],
                settings=LOOSE,
                expected=[Quarantined(line=8, field="messages", reason=NEAR)],
            )
        for place in (1, 4, 10):
            lines = rows("prompts")
            yield Case(
                family="one word more",
                name=f"{name}, undivided, after row {place}",
                lines=[*lines[:place], row("prompts", "near", near), *lines[place:]],
                evaluated=[FARMER],
                expected=[Apart(text="cows and sells 5"), Apart(text="COWS AND SELLS 5")],
            )
        yield Case(
            family="one word more",
            name=f"{name}, of another data set",
            lines=[row("prompts", "near", near, split="train"), *rows("prompts", split=True, skip=[6])],
            evaluated=[FARMER],
            settings=LOOSE,
            expected=[Quarantined(line=1, field="messages", reason=NEAR)],
        )
        yield Case(
            family="one word more",
            name=f"{name}, where it is not looked for",
            lines=[row("prompts", "near", near, split="train"), *rows("prompts", split=True)],
            evaluated=[FARMER.replace("12", "13")],
            settings={"near_duplicates": "ignore"},
            expected=[Sound()],
        )


HISTORIES: Mapping[str, tuple[str, ...]] = {
    "asked first": (FARMER, "Seven."),
    "asked in between": ("Hello, who are you?", "An assistant.", FARMER, "Seven."),
    "told by the assistant": ("Give me a riddle.", FARMER),
    "typed in another way": (f"\u201c{FARMER.upper()}\u201d", "7"),
}


def _histories() -> Iterator[Case]:
    for name, before in HISTORIES.items():
        for contract in CONTRACTS:
            leak = row(contract, "leak", "", messages=ask("Thank you. Are you sure?", *before))
            held_out = row(contract, "held", FARMER, split="eval")
            train = rows(contract, split=True, skip=[6])[:7]
            yield Case(
                family="a question in a history",
                name=f"{name}, {contract}",
                contract=contract,
                lines=[*train, {**leak, "split": "train"}, held_out],
                settings=LOOSE,
                expected=[Quarantined(line=8, field="messages", reason=HISTORY)],
            )
            yield Case(
                family="a question in a history",
                name=f"{name}, undivided {contract}",
                contract=contract,
                lines=[leak, *rows(contract, skip=[6])],
                evaluated=[FARMER],
                expected=[Apart(text="Are you sure?")],
            )
    asked = (FARMER, "Seven.", "And how many legs are these?")
    yield Case(
        family="a question in a history",
        name="a whole conversation that goes on",
        lines=[
            row("prompts", "leak", "", messages=ask("Thank you. Are you sure?", *asked, "28."), split="train"),
            *rows("prompts", split=True, skip=[6]),
            row("prompts", "held", "", messages=ask(asked[-1].upper(), *asked[:-1]), split="eval"),
        ],
        settings=LOOSE,
        expected=[Quarantined(line=1, field="messages", reason=HISTORY)],
    )
    last = row("prompts", "leak", "", messages=ask(FARMER, "Hello there", "Good day."), split="train")
    system = [{"role": "system", "content": FARMER}, *ask("And now?", "One", "Two")]
    for name, leak in {
        "asked last": last,
        "in the system turn": row("prompts", "leak", "", messages=system, split="train"),
    }.items():
        yield Case(
            family="a question in a history",
            name=name,
            lines=[leak, *rows("prompts", split=True, skip=[6])],
            evaluated=[FARMER],
            settings=LOOSE,
            expected=[Quarantined(line=1, field="messages", reason=HISTORY)],
        )


# Questions that differ in what a careless normaliser drops: each pair has two answers, and both are sound.
MINIMAL = (
    *[
        ("4+3", "4-3"),
        ("4 + 3 = ?", "4 * 3 = ?"),
        ("12", "1 2"),
        ("-5 + 8", "5 + 8"),
        ("5! + 1", "5 + 1"),
        ("3.5 + 1", "35 + 1"),
    ],
    *[("2*(3+4)", "(2*3)+4"), ("f'(2)", "f(2)"), ("x² at 3", "x2 at 3"), ("2² + 1", "22 + 1"), ("50% of 8", "50 of 8")],
    *[
        ("2, ?, 8", "2, 8, ?"),
        ("Is ([)] balanced?", "Is ([]) balanced?"),
        ("C++ or Rust?", "C or Rust?"),
        ("|x - 3|", "x - 3"),
    ],
    *[
        ("Is 3 < 4?", "Is 3 > 4?"),
        ("El año pasado", "El ano pasado"),
        ("今天是几号？", "明天是几号？"),
        ("a/b", "ab"),
        ("3:4", "3/4"),
    ],
    *[("Is it a number?", "Is it not a number?"), ("10^3", "103"), ("x_1 + 1", "x1 + 1"), ("1,000 + 1", "1.000 + 1")],
    *[("What is $5 in cents?", "What is €5 in cents?"), ("0b11", "011"), ("π r", "r"), ("¬p", "p"), ("√16", "16")],
)


def _what_must_stay_apart() -> Iterator[Case]:
    for one, other in MINIMAL:
        pair = [row("prompts", "one", one, reference="1"), row("prompts", "two", other, reference="2")]
        yield Case(
            family="different questions", name=f"{one} and {other}", lines=[*pair, *rows("prompts")], expected=[Sound()]
        )
        if "not" in other:  # a word more is what near duplicates are
            continue
        divided = [{**pair[0], "split": "train"}, {**pair[1], "split": "eval"}]
        lines = [*divided, *rows("prompts", split=True)]
        yield Case(family="different questions", name=f"{one} beside {other} held out", lines=lines, expected=[Sound()])
    code = [("def f(x): return X", "def f(x): return x"), ("# Print it.", "# print it"), ("x = 1", "x  = 1")]
    for one, other in code:
        divided = [row("prompts", "one", one, split="train"), row("prompts", "two", other, split="eval")]
        lines = [*divided, *rows("prompts", split=True)]
        exact = {"compare": "exact", "near_duplicates": "ignore"}
        yield Case(
            family="different questions", name=f"exactly: {one}", lines=lines, settings=exact, expected=[Sound()]
        )
        yield Case(
            family="different questions",
            name=f"loosely: {one}",
            lines=lines,
            expected=[Refused(words="prompts both for training and held out")],
        )
