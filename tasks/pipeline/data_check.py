"""A data set through its contract and gate, without a run: what is accepted, what is refused and why.

No tokenizer is at hand, so the budget of tokens, control tokens, and prompts that another data set holds out are the
run's to judge; all other rules are those of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import DataError
from rlcore.tasks.kinds.data.step import DATASET_KINDS
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.data import TokenView, Use, prepare_dataset
from rlcore.tasks.steps.references import unusable
from rlcore.tasks.store.storage import read_column, read_json

References = Literal["compared", "unused", "unknown"]
ContractName = Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]
OWN_ADAPTERS: Mapping[ContractName, str] = {
    "prompts": "prompts",
    "code_tasks": "code_tasks",
    "demonstrations": "demonstrations",
    "preference_pairs": "preferences",
}
"""The adapter of rows that are in the columns of each contract already."""

_ANY_LENGTH = 10**9
_EXAMPLES = 5  # quarantined rows that are shown
_TOKENS = TokenView(
    encode=lambda texts: [text.encode("utf-8", "replace") for text in texts],
    prompt_lengths=lambda conversations: [1] * len(conversations),
    max_prompt_tokens=lambda conversations: [1] * len(conversations),
    max_text_tokens=len,
    special_tokens=(),
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check: human-readable lines, and True if a run would take the rows."""

    passed: bool
    lines: tuple[str, ...]


def whole_file(path: str, contract: ContractName, adapter: str = "") -> DatasetConfig:
    """The configuration that takes all of a file, a tenth of it held out."""
    return DatasetConfig(
        contract=contract,
        adapter=adapter or OWN_ADAPTERS[contract],
        path=path,
        num_train=9 * 10**8,
        num_eval=10**8,
        max_tokens=_ANY_LENGTH,
    )


def check_data(
    name: str, config: DatasetConfig, *, seed: int, folder: Path, references: References = "unused"
) -> Check:
    """Gate one data set; the account (``report.json``, ``quarantine.jsonl``) and the rows stay in ``folder``.

    ``references``: whether ``math`` grades by them, so that those which grade nobody are refused. Where that is not
    known, they are named.

    Raises:
        ConfigError: unknown adapter or option, malformed hub path.
        StorageError: the folder cannot be written.
    """
    if config.adapter == "policy":
        return Check(passed=True, lines=(f"{name}: sampled from the policy {config.policy!r} in the run",))
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("report.json", "quarantine.jsonl"):
        (folder / old).unlink(missing_ok=True)
    unbounded = replace(config, max_tokens=_ANY_LENGTH)
    try:
        kind, use = DATASET_KINDS[config.contract], Use(is_graded=references == "compared")
        prepare_dataset(kind, unbounded, seed=seed, tokens=_TOKENS, folder=folder, use=use)
    except DataError as error:
        return Check(passed=False, lines=(f"{name}: REFUSED: {error}", *_account(folder)))
    named = _unusable(folder) if references == "unknown" and config.contract == "prompts" else ()
    sentence = _sentence(read_json(folder / "report.json"))
    return Check(passed=True, lines=(f"{name}: {sentence}", *_account(folder), *named))


def _unusable(folder: Path) -> Iterator[str]:
    """The rows by whose references nobody could be graded, should ``math`` grade them."""
    known: dict[str, str] = {}
    found: list[str] = []
    for split in ("train", "eval"):
        columns = [read_column(folder / f"{split}.parquet", name) for name in ("prompt_id", "reference")]
        for names, references in zip(*columns, strict=True):
            found += [f"{names[place]}: {reason}" for place, reason in unusable(references, known).items()]
    if found:
        yield f"  warning: {len(found):,} references grade no answer, should the reward `math` compare with them"
        yield from (f"    row {each}" for each in found[:_EXAMPLES])


def _sentence(report: Mapping[str, Any]) -> str:
    over = report["accepted"] - report["num_train"] - report["num_eval"]
    return (
        f"{report['num_train']:,} for training, {report['num_eval']:,} held out, {over:,} unused, "
        f"{report['quarantined']:,} quarantined ({report['contract']} from {report['source']})"
    )


def _account(folder: Path) -> Iterator[str]:
    """The quarantine's reasons, its first rows, and the warnings of the gate."""
    if not (folder / "report.json").is_file():
        return
    report = read_json(folder / "report.json")
    for reason, count in report["reasons"].items():
        yield f"  {count:,} x {reason}"
    for line in (folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()[:_EXAMPLES]:
        row = json.loads(line)
        yield f"    line {row['line']}, {row['field'] or 'row'}: {row['reason']} ({row['excerpt']!r:.200})"
    asked_for_all = report["num_train"] + report["num_eval"] == report["accepted"]
    for rule in report["rules"]:
        is_about_number = rule["name"] == "as_many_rows_as_asked"
        if rule["severity"] == "warning" and not rule["ok"] and not (is_about_number and asked_for_all):
            yield f"  warning: {rule['name'].replace('_', ' ')}: {rule['value']:.3g}, {rule['detail']}"
    if report["quarantined"]:
        yield f"  all refused rows: {folder / 'quarantine.jsonl'}"
