"""Recognition of a file's layout, as lines to paste into a preset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

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
from rlcore.errors import ConfigError
from rlcore.rewards.base import VERIFIERS
from rlcore.tasks.preflight.data_check import ContractName
from rlcore.tasks.presets.graph import Graders
from rlcore.tasks.steps.data_source import contract_errors
from rlcore.tasks.steps.references import unusable

_CONTRACTS: Mapping[Kind, ContractName] = {
    "prompts": "prompts",
    "demonstrations": "demonstrations",
    "preferences": "preference_pairs",
}


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
        suggested = skeleton(source, _unusable)
        answered = with_reference(source, found[0], _unusable) if found else ""
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


def _unusable(references: Sequence[str]) -> Mapping[int, str]:
    """Return the reasons against reference answers that no verifier can use."""
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
