"""Errors of rows together: contradictions, sets, ids and sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.attack.bad_data.case import (
    CONTRACTS,
    LOOSE,
    QUESTIONS,
    Case,
    Quarantined,
    Refused,
    Row,
    Sound,
    ask,
    row,
    rows,
)
from tests.attack.bad_data.typed import ACCENTED, FARMER, TYPED


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _contradictions()
    yield from _preferences()
    yield from _sets()
    yield from _ids_and_sides()


def _contradictions() -> Iterator[Case]:
    for name, typed in TYPED.items():
        question = ACCENTED if name == "decomposed accents" else FARMER
        first, second = row("prompts", "one", question), row("prompts", "two", typed(question), reference="another")
        reason = "another row has the same prompt and another reference"
        yield Case(
            family="two references",
            name=name,
            lines=[first, *rows("prompts", skip=[6]), second],
            settings=LOOSE,
            expected=[Quarantined(line=line, field="reference", reason=reason) for line in (1, 13)],
        )
    same = [row("prompts", "one", FARMER, reference="7"), row("prompts", "two", FARMER + " ", reference="7\u200b")]
    yield Case(
        family="two references",
        name="one reference, typed twice",
        lines=[*same, *rows("prompts", skip=[6])],
        expected=[Sound()],
    )


def _pair(name: str, better: str, worse: str, question: str = "Which is best?") -> Row:
    return row("preference_pairs", name, question, chosen=better, rejected=worse)


def _preferences() -> Iterator[Case]:
    mirror, circle = "prefers the same answers the other way", "prefer in a circle"
    for name in (
        "zero-width space",
        "hard blanks",
        "Cyrillic letters",
        "doubled blanks",
        "soft hyphens",
        "decomposed accents",
    ):
        typed = TYPED[name]
        pairs = [
            _pair("one", "caf\u00e9 au lait", "a green tea"),
            _pair("two", typed("a green tea"), typed("caf\u00e9 au lait")),
        ]
        yield _contradicting("pairs against each other", f"answers: {name}", pairs, mirror)
    for name, typed in TYPED.items():
        pairs = [_pair("one", "yes", "no", FARMER), _pair("two", "no", "yes", typed(FARMER))]
        if name != "decomposed accents":
            yield _contradicting("pairs against each other", f"questions: {name}", pairs, mirror)
    for length in (3, 4, 5, 9):
        answers = [f"answer {place}" for place in range(length)]
        pairs = [_pair(f"c{place}", answers[place], answers[(place + 1) % length]) for place in range(length)]
        yield _contradicting("preferences in a circle", f"of {length}", pairs, circle)
    hidden = [_pair("a", "x", "y"), _pair("b", "y\u200b", "z"), _pair("c", "z ", "x")]
    yield _contradicting("preferences in a circle", "answers typed in another way", hidden, circle)
    asked = [_pair("a", "x", "y", "Best?"), _pair("b", "y", "z", "best ?"), _pair("c", "z", "x", "\u201cBEST\u201d")]
    yield _contradicting("preferences in a circle", "questions typed in another way", asked, circle)
    chain = [
        _pair(f"c{place}{other}", f"answer {place}", f"answer {other}")
        for place in range(5)
        for other in range(place + 1, 5)
    ]
    yield Case(
        family="preferences in a circle",
        name="an order without a circle",
        contract="preference_pairs",
        lines=[*chain, *rows("preference_pairs")],
        expected=[Sound()],
    )


def _contradicting(family: str, name: str, pairs: Sequence[Row], reason: str) -> Case:
    found = [Quarantined(line=place + 1, field="pair_id", reason=reason) for place in range(len(pairs))]
    lines = [*pairs, *rows("preference_pairs", skip=[6])]
    return Case(family=family, name=name, contract="preference_pairs", lines=lines, settings=LOOSE, expected=found)


def _sets() -> Iterator[Case]:
    reason = "another pair of this set has another prompt or weight"
    both = [Quarantined(line=line, field="set_id", reason=reason) for line in (1, 2)]
    first = _pair("one", "x", "y") | {"set_id": "s"}
    others = {
        "two prompts": _pair("two", "x", "z", "Which is worst?"),
        "two weights": _pair("two", "x", "z") | {"weight": 0.5},
    }
    for name, other in others.items():
        lines = [first, other | {"set_id": "s"}, *rows("preference_pairs")]
        yield Case(family="a set", name=name, contract="preference_pairs", lines=lines, settings=LOOSE, expected=both)
    rankings = [
        {"set_id": "s", "messages": ask("Which is best?"), "completions": ["a", "b"], "ranks": [0, 1]},
        {"set_id": "s", "messages": ask("Which is worst?"), "completions": ["a", "b"], "ranks": [1, 0]},
    ]
    good = [{**rankings[0], "set_id": f"s{place}", "messages": ask(one)} for place, one in enumerate(QUESTIONS)]
    yield Case(
        family="a set",
        name="two rankings of one name",
        contract="preference_pairs",
        adapter="ranked_sets",
        lines=[*rankings, *good],
        settings=LOOSE,
        expected=both,
    )


def _ids_and_sides() -> Iterator[Case]:
    for contract in CONTRACTS:
        again = row(contract, "r3", "Is this a question of its own?")
        yield Case(
            family="ids and sides",
            name=f"an id twice in {contract}",
            contract=contract,
            lines=[*rows(contract), again],
            settings=LOOSE,
            expected=[
                Refused(words="rows with the id of an earlier row: 1; the first is 'r3' in line 13")
                if contract != "preference_pairs"  # where the id is the set's, too
                else Quarantined(line=13, field="set_id", reason="another pair of this set has another prompt")
            ],
        )
        half = rows(contract, split=True)
        del half[5]["split"]
        yield Case(
            family="ids and sides",
            name=f"a split for all rows but one of {contract}",
            contract=contract,
            lines=half,
            expected=[Refused(words="1 of 12 rows have no 'split'")],
        )
        for split in ("test", "", "TRAIN", "validation"):
            bad = row(contract, "bad", "Is this a question of its own?", split=split)
            found = Quarantined(line=1, field="split", reason="must be 'train' or 'eval'")
            lines = [bad, *rows(contract, split=True)]
            yield Case(
                family="ids and sides",
                name=f"split {split!r} in {contract}",
                contract=contract,
                lines=lines,
                settings=LOOSE,
                expected=[found],
            )
        one_side = [{**one, "split": "train"} for one in rows(contract)]
        yield Case(
            family="ids and sides",
            name=f"nothing held out of {contract}",
            contract=contract,
            lines=one_side,
            expected=[Refused(words="no rows for eval")],
        )
        yield Case(
            family="ids and sides",
            name=f"a training row in the evaluation's file of {contract}",
            contract=contract,
            lines=rows(contract, skip=[0]),
            eval_lines=[row(contract, "e", QUESTIONS[0]), row(contract, "bad", "Is this its own?", split="train")],
            settings=LOOSE,
            expected=[Quarantined(line=2, field="split", reason="its source is for 'eval'")],
        )
