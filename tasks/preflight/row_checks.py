"""Trial of the first rows of each data file before a run: adapter, contract, references, and lengths in tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from rlcore.data_contracts.adapters.expressions import describe_missing
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import LEFT_OUT, ContractError, RowError
from rlcore.data_contracts.gate.data_gate import group_of
from rlcore.data_contracts.gate.reading import Items, Source, Wanted
from rlcore.data_contracts.gate.records import Quarantined, SourceRow, canonical_json
from rlcore.data_contracts.gate.row_rules import RowCheckConfig, check_rows
from rlcore.data_contracts.gate.stream import Batch, RowFn, RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter
from rlcore.errors import RlcoreError
from rlcore.tasks.preflight.data_check import ANY_LENGTH, NO_TOKENIZER
from rlcore.tasks.presets.data import HUB, DatasetConfig
from rlcore.tasks.presets.graph import Graders
from rlcore.tasks.steps.data import (
    cached_hub_source,
    is_exact,
    open_stream,
    reference_screen,
)

SAMPLE = 300
"""Lines of each file that are tried; the data gate of a run reads all of them."""
_REASONS = 4  # of refused rows that are listed for a file
_SHORT = 3  # words of an answer
_NUMBER = re.compile(r"\W*\d[\d.,/ ]*\W*")
_STAND_INS: tuple[Any, ...] = ("", 1, [], [{"role": "user", "content": "a"}], {})


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Tried lines of a file: their number, refused ones with True if one refuses the dataset; ``is_all``: no more.

    ``is_divided``: rows name their side. ``columns``: those of the source. ``is_grouped``: each row names its document,
    or need not. ``swapped``: a question and its reference, if they seem to be swapped.
    """

    num_lines: int
    is_divided: bool
    refused: Sequence[tuple[Quarantined, bool]]
    is_all: bool
    columns: Collection[str]
    is_grouped: bool
    swapped: tuple[str, str] | None

    @cached_property
    def text(self) -> str:
        """Number of tried lines, as a sample if there are more."""
        return f"{self.num_lines} lines" if self.is_all else f"the first {self.num_lines} lines, a sample"


def tried(
    key: str, which: str, data: DatasetConfig, tokens: TokenMeter | None, *, graders: Graders
) -> tuple[list[str], list[str], bool]:
    """Return errors of the first rows of a file, sentences about rows that a run will quarantine, and True if rows
    name their side.

    ``data`` has the file as ``path``; ``which`` is its key in the section ``key``. Without ``tokens`` no length is
    checked. Of a hub dataset, the files in the hub's cache on this machine are tried.
    """
    is_hub = data.path.startswith(HUB)
    if is_hub and (source := cached_hub_source(data.path, limit=SAMPLE + 1)) is None:
        note = f"{key}.{which}: not checked: the run fetches these rows, the hub's cache on this machine has none"
        return [], [note], False
    try:
        stream, contract = open_stream(data, seed=0, source=source if is_hub else None)
        trial = _trial(stream, contract, data, tokens, graders=graders)
    except (ContractError, RlcoreError) as error:
        setting = "adapter" if error.what.startswith("the adapter") else which
        return [f"{key}.{setting}: {error.what}" + (f"; {error.fix}" if error.fix else "")], [], False
    if not trial.num_lines:
        return [f"{key}.{which}: the file has no rows"], [], False
    lines, unknown = list(_reasons(key, trial, stream)), list(_unknown_columns(key, data, trial))
    notes = [] if trial.is_all else [f"warning: {line}" for line in unknown]
    notes += _swap_warning(key, trial)
    errors = [*unknown] if trial.is_all else []
    if not trial.is_grouped:
        errors = [
            *errors,
            f"{key}.group_column: a row has no value of {data.mapping.group_column!r}; name another column",
        ]
    share = len({one.origin.line for one, _ in trial.refused}) / trial.num_lines
    is_fatal = any(is_fatal for _, is_fatal in trial.refused)
    if is_fatal or share > (data.max_quarantined if trial.is_all else 0.5):
        limit = f"; more than {key}.max_quarantined = {data.max_quarantined:g} allows"
        is_near = trial.is_all and not is_fatal and share < 0.5
        return [*(f"{line}{limit * is_near}" for line in lines), *errors], notes, trial.is_divided
    return errors, [*notes, *(f"warning: {line}; a run leaves such rows out" for line in lines)], trial.is_divided


def _trial(
    stream: RowStream, contract: Contract, data: DatasetConfig, tokens: TokenMeter | None, *, graders: Graders
) -> Trial:
    source, counted, columns = _head(stream.source)
    limit = data.max_tokens if tokens else ANY_LENGTH
    refused: list[tuple[Quarantined, bool]] = []
    known: dict[str, bytes] = {}
    is_divided, is_left, is_grouped, asked = False, False, True, list[tuple[str, str]]()
    group = data.mapping.group_column
    with reference_screen(data, graders)() as screen:
        terms = RowCheckConfig(max_tokens=limit, is_exact=is_exact(data), screen=screen)
        for batch in replace(stream, source=source).batches():
            refused += [(one, one.reason.startswith(LEFT_OUT)) for one in batch.rejected]
            is_divided |= any("split" in row for row in batch.rows)
            is_left |= bool(batch.rows)
            is_grouped &= not group or all(group_of(row, group) is not None for row in batch.rows)
            asked += [pair for row in batch.rows if all(map(str.strip, pair := _question_and_reference(row)))]
            checked = check_rows(batch, contract, terms, meter=tokens or NO_TOKENIZER, where=data.path).refused
            refused += [*checked.values(), *((one, True) for one in _repeated(batch, contract, checked, known))]
    if is_left:
        refused = [each for each in refused if not each[0].reason.startswith(LEFT_OUT)]
    return Trial(
        num_lines=counted["lines"],
        is_divided=is_divided,
        refused=refused,
        is_all=not counted["more"],
        columns=columns,
        is_grouped=is_grouped,
        swapped=asked[0] if data.contract == "prompts" and _are_swapped(asked) else None,
    )


def _question_and_reference(row: Mapping[str, Any]) -> tuple[str, str]:
    messages = row["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else {}
    found = last.get("content") if isinstance(last, Mapping) else "", row.get("reference")
    question, reference = (each if isinstance(each, str) else "" for each in found)
    return question, reference


def _are_swapped(asked: Sequence[tuple[str, str]]) -> bool:
    """Return True if all questions are bare numbers and no reference is one, or all are short and references ask."""
    if len(asked) < 2:
        return False
    if all(_NUMBER.fullmatch(question) and not _NUMBER.fullmatch(reference) for question, reference in asked):
        return True
    are_short = all(len(question.split()) <= _SHORT and "?" not in question for question, _ in asked)
    return are_short and all("?" in reference for _, reference in asked)


def _swap_warning(key: str, trial: Trial) -> Iterator[str]:
    if trial.swapped:
        question, reference = (text[:60] for text in trial.swapped)
        yield f"warning: {key}: the prompt is {question!r}, and its reference {reference!r}: are the two swapped?"


def _unknown_columns(key: str, data: DatasetConfig, trial: Trial) -> Iterator[str]:
    for name in data.mapping.drop_columns:
        if name not in trial.columns:
            where = "" if trial.is_all else f" in {trial.text}"
            yield f"{key}.drop_columns: {describe_missing(name, list(trial.columns))}{where}"


def _repeated(
    batch: Batch, contract: Contract, refused: Collection[int], known: dict[str, bytes]
) -> Iterator[Quarantined]:
    """Yield the rows whose id an earlier row with other texts has; ``known`` collects ids with their texts."""
    for place, (row, origin) in enumerate(zip(batch.rows, batch.origins, strict=True)):
        if place in refused:
            continue
        name = row[contract.id_column]
        texts = canonical_json({key: row[key] for key in ("messages", *contract.answers)})
        if known.setdefault(name, texts) != texts:
            reason = "an earlier row with other texts has this id; ids are unique, and made if there are none"
            yield Quarantined(origin=origin, field=contract.id_column, excerpt=name, reason=reason)


def _reasons(key: str, trial: Trial, stream: RowStream) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Quarantined]] = {}
    for one, _ in trial.refused:
        groups.setdefault((one.field, one.reason.partition(" at character ")[0]), []).append(one)
    for (field, reason), found in sorted(groups.items(), key=lambda pair: -len(pair[1]))[:_REASONS]:
        first = found[0]
        wanted = _wanted(stream, first.origin.line) if "missing column" in reason else ""
        budget = f"{key}.max_tokens" if " tokens" in reason else key
        named = f"{field}: " if field else ""
        shown = f" ({first.excerpt[:80]!r})" if first.excerpt and not wanted else ""
        yield f"{budget}: {named}{reason}{shown}{wanted}{_hint(reason)}; {_extent(found, trial)}"
    if len(groups) > _REASONS:
        yield f"{key}: and {len(groups) - _REASONS} other reasons; rlcore validate lists them"


def _extent(found: Sequence[Quarantined], trial: Trial) -> str:
    return f"{len(found)} of {trial.text}, the first is line {found[0].origin.line}"


def _hint(reason: str) -> str:
    return "; a row is one JSON object on one line: jq -c rewrites a file" if "malformed JSON" in reason else ""


def _wanted(stream: RowStream, line: int) -> str:
    """Name all columns that the adapter misses in a line: each is put in until the row is read."""
    rows = (item for _, item in stream.source.read(None) if item.origin.line == line)
    values = dict(getattr(next(rows, None), "values", {}))
    missing = missing_columns(stream.make, values)
    return f"; wanted and not there: {', '.join(missing)}" if len(missing) > 1 else ""


def missing_columns(make: RowFn, values: Mapping[str, Any]) -> list[str]:
    """Return the columns that a conversion misses in a row, in the order in which it reads them."""
    row, tried = dict(values), dict[str, int]()
    for _ in range(len(_STAND_INS) * 20):
        try:
            make(row)
        except RowError as error:
            name = error.field.partition(".")[0]
            if name in values or tried.get(name, -1) + 1 >= len(_STAND_INS):
                break
            tried[name] = tried.get(name, -1) + 1
            row[name] = _STAND_INS[tried[name]]
        else:
            break
    return list(tried)


def _head(source: Source) -> tuple[Source, dict[str, int], set[str]]:
    """Return the first lines of a source, and once they are read: their count, ``more`` behind them, their columns."""
    counted, columns = {"lines": 0, "more": 0}, set[str]()

    def read(wanted: Wanted | None) -> Items:
        for place, item in islice(source.read(wanted), SAMPLE + 1):
            if counted["lines"] == SAMPLE:
                counted["more"] = 1
                break
            counted["lines"] += 1
            columns.update(item.values if isinstance(item, SourceRow) else ())
            yield place, item
        return counted["lines"]

    return replace(source, read=read), counted, columns
