"""Errors of a single row, and of rows together: contradictions, sets, ids and sides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tests.attack.bad_data.case import (
    ACCENTED,
    CONTRACTS,
    FARMER,
    INVISIBLE,
    LOOSE,
    OWN_ADAPTERS,
    QUESTIONS,
    TYPED,
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

TEXTS: Mapping[Contract, tuple[str, ...]] = {
    "prompts": ("prompt_id", "task"),
    "demonstrations": ("demonstration_id", "task", "completion"),
    "preference_pairs": ("pair_id", "set_id", "source", "chosen", "rejected"),
}
RANKED: Row = {"set_id": "s", "messages": ask("Which is best?"), "completions": ["a", "b", "c"], "ranks": [0, 1, 2]}


def one_row() -> Iterator[Case]:
    yield from _invisible()
    yield from _alike()
    yield from _misspelt()
    yield from _other_contract()
    yield from _numbers()
    yield from _rankings()
    yield from _controls()
    yield from _types()


def _bad(family: str, name: str, contract: Contract, bad: Row | bytes, *expected: Expected, adapter: str = "") -> Case:
    good = rows(contract)
    return Case(
        family=family,
        name=name,
        contract=contract,
        adapter=adapter,
        lines=[*good[:4], bad, *good[4:]],
        expected=expected,
        settings=LOOSE,
    )


def _invisible() -> Iterator[Case]:
    for kind, text in INVISIBLE.items():
        for contract, names in TEXTS.items():
            for name in names:
                bad = row(contract, "bad", "Is this a question of its own?", **{name: text})
                found = Quarantined(line=5, field=name, reason="must not be blank")
                yield _bad("nothing to see", f"{kind} as {name} of {contract}", contract, bad, found)
            for turn in ("user", "system"):
                question = [{"role": "system", "content": text}, *ask("Why so?")] if turn == "system" else ask(text)
                bad = row(contract, "bad", "", messages=question)
                found = Quarantined(line=5, field="messages", reason="must be filled turns")
                yield _bad("nothing to see", f"{kind} as {turn} turn of {contract}", contract, bad, found)
        if text:
            bad = row("prompts", "bad", "Is this a question of its own?", reference=text)
            found = Quarantined(line=5, field="reference", reason="must be empty or something that a reader sees")
            yield _bad("nothing to see", f"{kind} as reference", "prompts", bad, found)
        bad = {**RANKED, "completions": ["a", text, "c"]}
        found = Quarantined(line=1, field="completions.1", reason="must not be blank")
        yield _ranked("nothing to see", f"{kind} in a ranking", bad, found)


def _alike() -> Iterator[Case]:
    answer = "The caf\u00e9 opens at 9 and closes late."
    unseen = (
        "zero-width space",
        "zero-width joiners",
        "word joiner",
        "byte order mark",
        "soft hyphens",
        "tag characters",
    )
    looks = (
        "direction marks",
        "Cyrillic letters",
        "Greek letters",
        "doubled blanks",
        "hard blanks",
        "decomposed accents",
    )
    for name in (*unseen, *looks, "variation selector", "grapheme joiner", "control character"):
        bad = row("preference_pairs", "bad", "When?", chosen=answer, rejected=TYPED[name](answer))
        found = Quarantined(line=5, field="rejected", reason="chosen and rejected look the same")
        yield _bad("sides that look the same", name, "preference_pairs", bad, found)
    for name, other in {"a blank at the end": answer + " ", "a line end": answer + "\n", "nothing": answer}.items():
        bad = row("preference_pairs", "bad", "When?", chosen=answer, rejected=other)
        found = Quarantined(line=5, field="", reason="chosen and rejected")
        yield _bad("sides that look the same", name, "preference_pairs", bad, found)
    for name in ("capitals", "no mark at the end", "bold", "another mark"):
        fine = row("preference_pairs", "bad", "When?", chosen=answer, rejected=TYPED[name](answer))
        yield _bad("sides that differ in style", name, "preference_pairs", fine, Sound())


def _misspelt() -> Iterator[Case]:
    spellings = {
        "split": ("splits", "splitt", "Split", "SPLIT", "spilt", "split "),
        "margin": ("margins", "margn", "Margin", "marjin"),
        "probability": ("probabilty", "probabilities", "Probability", "propability"),
        "weight": ("weigth", "wieght", "weights", "Weight"),
        "set_id": ("setid", "set-id", "sets_id", "Set_ID"),
        "contract": ("contracts", "contarct"),
    }
    for name, misspelt in spellings.items():
        for field in misspelt:
            bad = row("preference_pairs", "bad", "Why not?", **{field: 0.75})
            found = Quarantined(line=5, field=field, reason=f"{name!r} is: rename it")
            yield _bad("a misspelt field", f"{field} for {name}", "preference_pairs", bad, found)
    for contract in ("prompts", "demonstrations"):
        bad = row(contract, "bad", "Why not?", spilt="train")
        yield _bad(
            "a misspelt field",
            f"spilt in {contract}",
            contract,
            bad,
            Quarantined(line=5, field="spilt", reason="rename"),
        )
    fine = row("preference_pairs", "fine", "Why not?", difficulty=3, url="x", annotator_id="z")
    yield _bad("a misspelt field", "columns of another purpose", "preference_pairs", fine, Sound())


def _other_contract() -> Iterator[Case]:
    for contract in TEXTS:
        adapter = OWN_ADAPTERS[contract]
        for named in ("prompts/v9", "rollouts/v1", "v2", 2, None, ""):
            bad = {**row(contract, "bad", "Why not?"), "contract": named}
            found = Quarantined(line=5, field="contract", reason="the row is of another contract")
            yield _bad("another contract", f"{named!r} in {adapter}", contract, bad, found)
    fine = {**row("preference_pairs", "fine", "Why not?"), "contract": "preference_pairs/v2"}
    yield _bad("another contract", "the right one", "preference_pairs", fine, Sound())


def _numbers() -> Iterator[Case]:
    wrong = {
        "margin": ("1e300", "100.1", "-0.5", "-1e300", "true", '"1"', "null", "[]", "1e999", "NaN"),
        "probability": ("0.5", "0.4", "1.0001", "-1", "0", '"high"', "null", "1e308"),
        "weight": ("0", "-1", "1.5", "1e300", '"1"', "null", "Infinity"),
    }
    for name, values in wrong.items():
        for value in values:
            text = json.dumps(row("preference_pairs", "bad", "Why not?", **{name: "VALUE"})).replace('"VALUE"', value)
            # What is no JSON at all has no field.
            field = "" if value in ("NaN", "Infinity", "1e999") else name
            found = Quarantined(line=5, field=field, reason="")
            yield _bad("a number out of bounds", f"{name} = {value}", "preference_pairs", text.encode(), found)
    for name, value in {"margin": 100, "probability": 1, "weight": 1e-9}.items():
        fine = row("preference_pairs", "fine", "Why not?", **{name: value})
        yield _bad("a number out of bounds", f"{name} = {value} is within", "preference_pairs", fine, Sound())


def _ranked(family: str, name: str, bad: Row, *expected: Expected) -> Case:
    good = [{**RANKED, "set_id": f"s{place}", "messages": one["messages"]} for place, one in enumerate(rows("prompts"))]
    return Case(
        family=family,
        name=name,
        contract="preference_pairs",
        adapter="ranked_sets",
        lines=[bad, *good],
        expected=expected,
        settings=LOOSE,
    )


def _rankings() -> Iterator[Case]:
    many = [str(number) for number in range(300)]
    wrong: dict[str, tuple[Row, str, str]] = {
        "300 answers": ({"completions": many, "ranks": list(range(300))}, "completions", "more than 64"),
        "65 answers": ({"completions": many[:65], "ranks": list(range(65))}, "completions", "more than 64"),
        "a rank too few": ({"ranks": [0, 1]}, "ranks", "2 ranks for 3 completions"),
        "all tied": ({"ranks": [1, 1, 1]}, "ranks", "all completions are tied"),
        "one answer": ({"completions": ["a"], "ranks": [0]}, "ranks", "tied"),
        "no answer": ({"completions": [], "ranks": []}, "ranks", "tied"),
        "a rank that is true": ({"ranks": [0, 1, True]}, "ranks.2", "must be a whole number"),
        "a rank of 1.5": ({"ranks": [0, 1.5, 2]}, "ranks.1", "must be a whole number"),
        "an answer that is null": ({"completions": ["a", None, "c"]}, "completions.1", "must be a text"),
        "answers as a text": ({"completions": "abc"}, "completions", "must be a list"),
        "an answer twice, in two ranks": ({"completions": ["a", "b", "a"]}, "", "chosen and rejected are the same"),
        "an answer twice, unseen": ({"completions": ["a", "b", "a\u200b"]}, "", "chosen and rejected look the same"),
    }
    for name, (changes, field, reason) in wrong.items():
        found = Quarantined(line=1, field=field, reason=reason)
        yield _ranked("a ranking", name, {**RANKED, **changes}, found)
    fine = {**RANKED, "completions": many[:64], "ranks": list(range(64))}
    yield _ranked("a ranking", "64 answers", fine, Sound())
    yield _ranked("a ranking", "a rank of 1.0", {**RANKED, "ranks": [0, 1.0, 2]}, Sound())


def _controls() -> Iterator[Case]:
    for token in ("<|im_start|>", "<|im_end|>"):
        for contract, names in TEXTS.items():
            for name in {"completion", "chosen", "rejected"} & set(names):
                bad = row(contract, "bad", "Why not?", **{name: f"It is so{token}"})
                yield _bad(
                    "a control token",
                    f"{token} as {name}",
                    contract,
                    bad,
                    Refused(words=f"line 5, {name}: contains the special"),
                )
            question = [{"role": "system", "content": f"Be brief{token}user"}, *ask("Why not?")]
            bad = row(contract, "bad", "", messages=question)
            yield _bad(
                "a control token",
                f"{token} in a system turn of {contract}",
                contract,
                bad,
                Refused(words="line 5, messages.0"),
            )
        for contract in ("prompts", "demonstrations"):
            bad = row(contract, "bad", "Why not?", reference=f"4{token}")
            yield _bad(
                "a control token",
                f"{token} as reference of {contract}",
                contract,
                bad,
                Refused(words="line 5, reference: contains the special"),
            )
        bad = row("prompts", "bad", f"Why{token}not?")
        yield _bad(
            "a control token", f"{token} in a question", "prompts", bad, Refused(words="line 5, messages.0.content")
        )


def _types() -> Iterator[Case]:
    for contract in TEXTS:
        adapter = OWN_ADAPTERS[contract]
        sound = row(contract, "bad", "Why not?")
        for field in sound:
            a_list: list[object] = [["x"]] if field == "reference" else ["x"]  # a list of texts has the right answers
            for wrong in (None, 7, True, a_list, {"x": 1}):
                bad = {**sound, field: wrong}
                found = Quarantined(line=5, field=field, reason="must be")
                yield _bad("a wrong type", f"{wrong!r} as {field} of {adapter}", contract, bad, found)
            bad = {name: value for name, value in sound.items() if name != field}
            is_made = field in ("prompt_id", "demonstration_id", "pair_id")  # of the content
            found = Sound() if is_made else Quarantined(line=5, field=field, reason="missing column")
            yield _bad("a wrong type", f"no {field} in {adapter}", contract, bad, found)
    for name, messages in {
        "an extra field": [{"role": "user", "content": "Why?", "name": "x"}],
        "no role": [{"content": "Why?"}],
        "a role of our own": [{"role": "wizard", "content": "Why?"}],
        "an answer last": [*ask("Why?"), {"role": "assistant", "content": "So."}],
        "a system turn within": [*ask("Why?"), {"role": "system", "content": "Be brief."}, *ask("And?")],
        "no turn": [],
    }.items():
        bad = row("prompts", "bad", "", messages=messages)
        yield _bad("a conversation", name, "prompts", bad, Quarantined(line=5, field="messages", reason="must be"))


def across_rows() -> Iterator[Case]:
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
