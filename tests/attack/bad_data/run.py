"""Every faulty input through the gate, and a table of what became of them: ``python -m tests.attack.bad_data.run``."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.strict_config import build
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.data import prepare_dataset
from rlcore.tasks.steps.rows import read_demonstrations, read_pairs, read_prompts
from tests.attack.bad_data import files, leaks, rows
from tests.attack.bad_data.case import OWN_ADAPTERS, Apart, Case, Expected, Quarantined, Refused, Sound, ask
from tests.tasks.steps.token_views import words_view

TOKENS = words_view(4, special_tokens=("<|im_start|>", "<|im_end|>"))
READERS = {"prompts": read_prompts, "demonstrations": read_demonstrations, "preference_pairs": read_pairs}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a data set. ``refusal``: the message of its refusal, or empty if it was accepted."""

    refusal: str
    quarantine: Sequence[dict[str, Any]]
    train: Sequence[str]


def all_cases() -> list[Case]:
    """Every case; no two have the same name."""
    return [*rows.one_row(), *leaks.cases(), *rows.across_rows(), *files.cases()]


def attack(case: Case, folder: Path) -> Outcome:
    path, held_out = case.write(folder)
    keys = {
        "contract": case.contract,
        "adapter": case.adapter or OWN_ADAPTERS[case.contract],
        "path": str(path),
        "eval_path": str(held_out) if held_out else "",
        "num_train": 3_000,
        "num_eval": 1_000,
        "max_tokens": 2_000,
    }
    config = build(DatasetConfig, {**keys, **case.settings})
    snapshot, refusal = folder / "snapshot", ""
    questions = [ask(text) for text in case.evaluated]
    try:
        prepare_dataset(config, seed=0, tokens=TOKENS, folder=snapshot, evaluated=questions)
    except RlcoreError as error:
        refusal = str(error)
    return Outcome(refusal=refusal, quarantine=_quarantine(snapshot), train=_train(case, snapshot))


def faults(case: Case, outcome: Outcome) -> Iterator[str]:
    for one in case.expected:
        fault = _fault(one, outcome)
        if fault:
            yield f"{case.family}: {case.name}: {fault}"


def _fault(expected: Expected, outcome: Outcome) -> str:
    if isinstance(expected, Refused):
        return (
            ""
            if expected.words in outcome.refusal
            else f"refused in words other than {expected.words!r}: {outcome.refusal!r}"
        )
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if isinstance(expected, Sound):
        return f"a false alarm: {outcome.quarantine}" if outcome.quarantine else ""
    if isinstance(expected, Apart):
        leaks = [text for text in outcome.train if expected.text in text]
        return f"trained on: {leaks}" if leaks else ""
    found = [one for one in outcome.quarantine if _is_it(expected, one)]
    return "" if found else f"not quarantined as {expected}: {outcome.quarantine}"


def _is_it(expected: Quarantined, entry: dict[str, Any]) -> bool:
    is_field = entry["field"].startswith(expected.field)
    return entry["line"] == expected.line and is_field and expected.reason in entry["reason"]


def _quarantine(snapshot: Path) -> list[dict[str, Any]]:
    path = snapshot / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _train(case: Case, snapshot: Path) -> list[str]:
    path = snapshot / "train.parquet"
    rows = READERS[case.contract](path) if path.is_file() else []
    return [" ".join(message.content for message in row.messages) for row in rows]


def main() -> None:
    """Run them all, print a table by family, and fail where one is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression of families and names")
    chosen = [one for one in all_cases() if re.search(parser.parse_args().only, f"{one.family}: {one.name}")]
    started, tried, caught, wrong = time.process_time(), Counter[str](), Counter[str](), list[str]()
    for case in chosen:
        with tempfile.TemporaryDirectory() as name:
            found = list(faults(case, attack(case, Path(name))))
        tried[case.family] += 1
        caught[case.family] += not found
        wrong += found
    sound = sum(isinstance(one, Sound) for case in chosen for one in case.expected)
    lines = ["| inputs | tried | as they should be |", "|---|---|---|"]
    lines += [f"| {family} | {number} | {caught[family]} |" for family, number in tried.items()]
    lines += [f"| **all** | **{tried.total()}** | **{caught.total()}** |", ""]
    lines += [f"{sound} of them are sound. {time.process_time() - started:.0f} s of processor time."]
    print("\n".join([*lines, *wrong]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
