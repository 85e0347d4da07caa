"""Data check without a run: recognition of a file's layout; the dataset passes through its contract and gate.

Without a tokenizer, only the run checks token budget, control tokens, and prompts that other datasets hold out. All
other rules are those of a run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Literal

from rlcore.data_contracts.adapters.convert import contract_of, is_generator
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.recognition import (
    Fit,
    describe_columns,
    fits,
    mapping_line,
    skeleton,
    with_reference,
)
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.data_contracts.contracts import code_tasks
from rlcore.data_contracts.gate.files import READERS
from rlcore.data_contracts.gate.reading import ENDINGS, read_source
from rlcore.data_contracts.gate.token_budget import TokenMeter
from rlcore.errors import ConfigError, DataError
from rlcore.rewards.base import VERIFIERS
from rlcore.tasks.presets.data import DatasetConfig, too_few_held_out
from rlcore.tasks.presets.graph import NO_GRADERS, Graders
from rlcore.tasks.steps.data import prepare_dataset
from rlcore.tasks.steps.data_source import contract_errors, ignored_path
from rlcore.tasks.steps.references import unusable
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_column, read_json

ContractName = Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]
OWN_ADAPTERS: Mapping[ContractName, str] = {
    "prompts": "prompts",
    "code_tasks": "code_tasks",
    "demonstrations": "demonstrations",
    "preference_pairs": "preferences",
}
"""The adapter of rows that are in the columns of each contract already."""

_CONTRACTS: Mapping[Kind, ContractName] = {
    "prompts": "prompts",
    "demonstrations": "demonstrations",
    "preferences": "preference_pairs",
}
_MATH = Graders(kinds=("math",))
_EXAMPLES = 5  # quarantined rows that are shown
ANY_LENGTH = 10**9
NO_TOKENIZER = TokenMeter(
    encode=lambda texts: [text.encode("utf-8", "replace") for text in texts],
    prompt_lengths=lambda conversations: [1] * len(conversations),
    max_prompt_tokens=lambda conversations: [1] * len(conversations),
    max_text_tokens=len,
    special_tokens=(),
)
"""Stands in for a tokenizer, together with ``ANY_LENGTH`` tokens of a row: no length is checked."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check: human-readable lines, and True if a run would take the rows."""

    passed: bool
    lines: tuple[str, ...]


@contextmanager
def reports_in(home: Home) -> Iterator[Path]:
    """Yield the folder for reports: ``checks/`` of the state directory.

    Without a state directory it is a temporary folder, of which only the reports of sets with rejected rows stay.
    """
    if home.is_made:
        yield home.root / "checks"
        return
    folder = Path(tempfile.mkdtemp(prefix="rlcore-checks-"))
    try:
        yield folder
    finally:
        for checked in folder.iterdir():
            rejected = checked / "quarantine.jsonl"
            for path in checked.glob("*.parquet" if rejected.is_file() and rejected.stat().st_size else "*"):
                path.unlink()
            with suppress(OSError):
                checked.rmdir()
        with suppress(OSError):
            folder.rmdir()


def whole_file(path: str, contract: ContractName, adapter: str = "") -> DatasetConfig:
    """Return the configuration that takes a whole file and holds out a tenth of it."""
    return DatasetConfig(
        contract=contract,
        adapter=adapter or OWN_ADAPTERS[contract],
        path=path,
        num_train=9 * 10**8,
        num_eval=10**8,
        max_tokens=ANY_LENGTH,
    )


def check_data(
    name: str, config: DatasetConfig, *, seed: int, folder: Path, graders: Graders | None = NO_GRADERS
) -> Check:
    """Gate one dataset. Report (``report.json``), ``quarantine.jsonl`` and rows stay in ``folder``.

    ``graders``: those of its answers, which reject reference answers that they cannot use. None: they are unknown, and
    those that the reward ``math`` could not use are listed.
    Raises:
        ConfigError: unknown adapter or option, malformed hub path.
        StorageError: the folder cannot be written.
    """
    if config.reader == "policy":
        return Check(passed=True, lines=(f"{name}: sampled from the policy {config.policy!r} in the run",))
    if ignored := ignored_path(config):
        return Check(passed=False, lines=(f"{name}: REFUSED: {ignored}",))
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("report.json", "quarantine.jsonl"):
        (folder / old).unlink(missing_ok=True)
    unbounded = replace(config, max_tokens=ANY_LENGTH)
    try:
        known = graders or NO_GRADERS
        report = prepare_dataset(unbounded, seed=seed, tokens=NO_TOKENIZER, folder=folder, graders=known)
        if graders is not None and (error := too_few_held_out(config, report.num_eval)):
            raise DataError(error, where=f"data.{name}.num_eval")
    except DataError as error:
        return Check(passed=False, lines=(f"{name}: REFUSED: {error}", *_details(folder)))
    named = _unusable(folder) if graders is None and config.contract == "prompts" else ()
    sentence = f"{name}: {report.summary} ({report.contract} from {report.source})"
    return Check(passed=True, lines=(sentence, *_details(folder), *named))


def _unusable(folder: Path) -> Iterator[str]:
    known: dict[str, str] = {}
    found: list[str] = []
    for split in ("train", "eval"):
        columns = [read_column(folder / f"{split}.parquet", name) for name in ("prompt_id", "reference")]
        for names, references in zip(*columns, strict=True):
            found += [f"{names[place]}: {reason}" for place, reason in unusable(references, _MATH, known).items()]
    if found:
        yield f"  warning: {len(found):,} references grade no answer, should the reward `math` compare with them"
        yield from (f"    row {each}" for each in found[:_EXAMPLES])


def _details(folder: Path) -> Iterator[str]:
    if not (folder / "report.json").is_file():
        return
    report = read_json(folder / "report.json")
    for reason, count in report["reasons"].items():
        yield f"  {count:,} x {reason}"
    for line in (folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()[:_EXAMPLES]:
        row = json.loads(line)
        found = f" ({row['excerpt']!r:.200})" if row["excerpt"] else ""
        file = f"{row['source']}, " if row["source"] else ""
        yield f"    {file}line {row['line']}, {row['field'] or 'row'}: {row['reason']}{found}"
    asked_for_all = report["num_train"] + report["num_eval"] == report["accepted"]
    for rule in report["rules"]:
        is_about_number = rule["name"] == "as_many_rows_as_asked"
        if rule["severity"] == "warning" and not rule["ok"] and not (is_about_number and asked_for_all):
            yield f"  warning: {rule['detail']}"
    if report["quarantined"]:
        yield f"  all rejected rows: {folder / 'quarantine.jsonl'}"


@dataclass(frozen=True, kw_only=True)
class Recognition:
    """Lines about the layouts that a file fits, and the likeliest one; "" if none fits."""

    lines: tuple[str, ...]
    adapter: str = ""


def is_file_of_rows(path: str) -> bool:
    """Return True if a path ends as files of rows do, is a pattern or a folder, or is a file that is no preset.

    Raises:
        ConfigError: it ends as files of rows do, and there is no such file.
    """
    is_there = has_magic(path) or Path(path).exists()
    if path.endswith(ENDINGS) and not is_there:
        raise ConfigError("no such file", where=path, fix=f"give the path of {READERS}")
    return path.endswith(ENDINGS) or (is_there and not path.endswith(".toml"))


def recognize(path: str) -> Recognition:
    """Return the layouts that the first rows of a file fit.

    Raises:
        DataError: the file cannot be read.
    """
    with contract_errors():
        source = read_source(Path(path))
        found = fits(source)
        columns = describe_columns(source)
        suggested = skeleton(source, _without_grader)
        answered = with_reference(source, found[0], _without_grader) if found else ""
    name = Path(path).name
    head = f"{name}: columns {', '.join(columns) or 'none'}"
    if not found:
        hint = f"{name}: no known layout fits; complete this mapping and paste it into [data.<name>]:"
        return Recognition(lines=(head, hint, f"  {suggested}"))
    lines = [line for fit in found for line in _lines(fit)]
    if answered:
        lines.append(f"  with a column that may be the reference answer: {answered}")
    several = "these layouts fit, the likeliest first" if len(found) > 1 else "this layout fits"
    return Recognition(
        lines=(head, f"{name}: {several}; paste one line into [data.<name>]:", *lines), adapter=found[0].adapter
    )


def _without_grader(references: Sequence[str]) -> Mapping[int, str]:
    return unusable(references, Graders(kinds=VERIFIERS), {})


def contract_for(adapter: str) -> ContractName:
    """Return the contract of the first kind of rows that an adapter reads.

    Raises:
        ConfigError: it is unknown, or reads no file.
    """
    with contract_errors(ConfigError):
        is_generator(adapter)
    rows = ADAPTERS[adapter].rows if adapter in ADAPTERS else {}
    if not rows:
        raise ConfigError(f"--contract is missing: the row type of {adapter!r} is unknown", where="--contract")
    kind = next(iter(rows))
    return "code_tasks" if contract_of(adapter, kind) is code_tasks.CONTRACT else _CONTRACTS[kind]


def _lines(fit: Fit) -> Iterator[str]:
    yield f'  adapter = "{fit.adapter}"'
    for kind in fit.kinds:
        contract = contract_for(fit.adapter) if kind == fit.kinds[0] else _CONTRACTS[kind]
        columns = LAYOUTS[fit.adapter].columns[kind] if fit.adapter in LAYOUTS else {}
        is_gathered = fit.adapter in LAYOUTS and LAYOUTS[fit.adapter].gather
        same = f", the same as {mapping_line(columns)}" if columns and not is_gathered else ""
        yield f'    with contract = "{contract}"{same}'
