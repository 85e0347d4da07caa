"""Datasets from any source as gated Parquet files. The only file that imports ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pandas as pd

from rlcore.choices import choices
from rlcore.data_contracts.adapters import convert
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts import code_tasks
from rlcore.data_contracts.contracts.code_tasks import Trial, broken_tests
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate import data_gate
from rlcore.data_contracts.gate.data_gate import GateLimits, GateReport, GateResult
from rlcore.data_contracts.gate.eval_leakage import SharedWords
from rlcore.data_contracts.gate.reading import Source, joined, read_source, source_of
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter
from rlcore.errors import DataError
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from rlcore.tasks.presets.data import HUB, POLICY, DatasetConfig
from rlcore.tasks.presets.graph import NO_GRADERS, Graders
from rlcore.tasks.steps.data_source import check_options, contract_errors, hub_parts, hub_snapshot, resolve_adapter
from rlcore.tasks.steps.references import references_screen
from rlcore.tasks.store.storage import table_writer, write_bytes, write_json

_SHOWN_CHARACTERS = 80  # characters of a test


def prepare_dataset(
    config: DatasetConfig,
    *,
    seed: int,
    tokens: TokenMeter,
    folder: Path,
    evaluated: Sequence[Messages] = (),
    graders: Graders = NO_GRADERS,
) -> GateReport:
    """Gate rows into ``train.parquet``, ``eval.parquet``, ``quarantine.jsonl`` and ``report.json`` in ``folder``.

    ``evaluated``: evaluation prompts of other datasets. They are held out if the gate divides the rows; a source that
    has them in its ``train`` split is rejected. ``graders``: those of its answers; rows whose reference answers they
    cannot use are rejected.
    Raises:
        ConfigError: unknown adapter or option, malformed hub path.
        DataError: an unreadable source, or a dataset that the gate rejects; then only report and quarantine are
            written.
        StorageError: the folder cannot be written.
    """
    check_options(config)
    adapter = resolve_adapter(config)
    # Generated problems are all different but similar.
    keeps_apart = config.comparison.near_duplicates == "exclude" and not convert.is_generator(adapter)
    limits = GateLimits(
        num_train=config.num_train,
        num_eval=config.num_eval,
        max_tokens=config.max_tokens,
        max_quarantined=config.max_quarantined,
        evaluated=evaluated,
        seed=seed,
        is_exact=is_exact(config),
        keeps_apart=keeps_apart,
        shared_words=SharedWords(size=config.comparison.ngram_size, action=config.comparison.ngram_overlap),
        group_column=config.mapping.group_column,
    )
    with contract_errors():
        stream, contract = open_stream(config, seed=seed)
    screen = SCREENS["tests"] if contract is code_tasks.CONTRACT else reference_screen(config, graders)
    return _prepare(stream, contract, limits, tokens=tokens, folder=folder, screen=screen)


def reference_screen(config: DatasetConfig, graders: Graders) -> Callable[[], AbstractContextManager[RowFilter | None]]:
    """Return the screen of the reference answers of prompts that come from a file; rows of generators are sound."""
    if config.contract != "prompts" or not graders.compare or convert.is_generator(resolve_adapter(config)):
        return SCREENS["none"]
    return partial(SCREENS["references"], graders)


def open_stream(config: DatasetConfig, *, seed: int, source: Source | None = None) -> tuple[RowStream, Contract]:
    """Open the rows of a dataset as contract rows, with their contract. Nothing is read but what names the format.

    ``source``: rows that are already open.

    Raises:
        ContractError: an unreadable source, or an adapter of other rows.
        ConfigError: unknown adapter, malformed hub path.
    """
    adapter, kind, mapping = resolve_adapter(config), config.kind, config.mapping
    source = source or _source(adapter, config, seed)
    contract = code_tasks.CONTRACT if config.contract == "code_tasks" else convert.contract_of(adapter, kind)
    stream = convert.stream_of(source, kind, adapter=adapter, columns=mapping.columns, without=mapping.drop_columns)
    return replace(stream, system=config.system_prompt), contract


def prepare_source(
    kind: Kind, source: Source, limits: GateLimits, *, adapter: str, tokens: TokenMeter, folder: Path
) -> GateReport:
    """Gate rows that are already read or generated; raise as :func:`prepare_dataset`."""
    with contract_errors():
        stream = convert.stream_of(source, kind, adapter=adapter)
        contract = convert.contract_of(adapter, kind)
    screen = SCREENS["tests" if contract is code_tasks.CONTRACT else "none"]
    return _prepare(stream, contract, limits, tokens=tokens, folder=folder, screen=screen)


def is_exact(config: DatasetConfig) -> bool:
    """Return True if every character counts when texts of a dataset are compared."""
    adapter = resolve_adapter(config)
    return config.comparison.compare == "exact" or (adapter != POLICY and convert.is_exact(adapter))


def _prepare(
    stream: RowStream,
    contract: Contract,
    limits: GateLimits,
    *,
    tokens: TokenMeter,
    folder: Path,
    screen: Callable[[], AbstractContextManager[RowFilter | None]],
) -> GateReport:
    with ExitStack() as stack, contract_errors():
        looked = stack.enter_context(screen())
        add = {split: stack.enter_context(table_writer(folder / f"{split}.parquet")) for split in ("train", "eval")}

        def sink(frame: pd.DataFrame) -> None:
            for split, write in add.items():
                write(frame[frame["split"] == split])

        screened = replace(limits, screen=looked)
        result = data_gate.check(stream, contract, screened, meter=tokens, sink=sink)
        _write_report(result, folder, where=stream.source.name)
    return result.report


def _write_report(result: GateResult, folder: Path, *, where: str) -> None:
    lines = [json.dumps(one.to_json(), ensure_ascii=False) + "\n" for one in result.quarantine]
    write_bytes("".join(lines).encode("utf-8"), folder / "quarantine.jsonl")
    write_json(result.report.to_json(), folder / "report.json")
    result.report.require_passed(
        where=where,
        fix=f"the rejected rows are in {folder / 'quarantine.jsonl'}, the counts in {folder / 'report.json'}",
    )


def _source(adapter: str, config: DatasetConfig, seed: int) -> Source:
    if convert.is_generator(adapter):
        known, takes_settings = convert.known_options(adapter, config.kind)
        options = {
            name: value for name, value in config.options.items() if name in known or (takes_settings and "." in name)
        }
        return convert.generate(
            config.kind, adapter, num_train=config.num_train, num_eval=config.num_eval, seed=seed, options=options
        )
    train = _read(config.path)
    return joined(train, _read(config.eval_path)) if config.eval_path else train


def _read(path: str) -> Source:
    return _read_hub(path) if path.startswith(HUB) else read_source(Path(path))


def _read_hub(path: str) -> Source:
    """Read a split of a hub dataset, ``train`` unless the path names one, at one commit; none of its code runs."""
    import datasets

    parts = hub_parts(path)
    try:
        split = parts["split"] or "train"
        loaded = datasets.load_dataset(parts["name"], parts["subset"], revision=parts["revision"], split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the dataset cannot be loaded from the hub: {error}",
            where=path,
            fix="check the name, the revision and the network, or download it and set path to the file",
        ) from error
    return source_of(path, loaded)  # rows are read lazily from disk


def cached_hub_source(path: str, *, limit: int) -> Source | None:
    """Return the first rows of a hub dataset whose files are in the hub's cache on this machine; None if they are not.

    Raises:
        ConfigError: malformed hub path.
    """
    folder, parts = hub_snapshot(path), hub_parts(path)
    if folder is None:
        return None
    import datasets

    try:
        split = parts["split"] or "train"
        rows = datasets.load_dataset(str(folder), parts["subset"], split=split, streaming=True)
        return source_of(path, list(islice(rows, limit)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError):  # only other splits are there, or a part
        return None


@contextmanager
def _working_tests() -> Iterator[RowFilter]:
    """Return a row filter against tasks whose solution fails, or whose tests pass a stub, in a sandbox.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    with SandboxPool() as sandbox:
        yield lambda references: broken_tests(references, lambda trials: _failures(sandbox, trials))


def _failures(sandbox: SandboxPool, trials: Sequence[Trial]) -> list[str]:
    limits = ResourceLimits(wall_seconds=10.0, cpu_seconds=60)
    jobs = [Job(reference=trial.reference, code=trial.code, limits=limits, stop_early=True) for trial in trials]
    # INFRA here is a row whose tests cannot run at all: a broken sandbox fails when it starts.
    return [
        _failure(trial.reference, outcomes) for trial, outcomes in zip(trials, sandbox.check_all(jobs), strict=True)
    ]


def _failure(reference: str, outcomes: Sequence[RunResult]) -> str:
    for place, one in enumerate(outcomes):
        if one.status is not RunStatus.PASS:
            return f"test {place + 1} of {len(outcomes)}, {_shown_test(reference, place)}: {one.error or one.status}"
    return ""


def _shown_test(reference: str, place: int) -> str:
    task = json.loads(reference, parse_int=lambda digits: int(digits[:_SHOWN_CHARACTERS]))  # long integers have no text
    test = task["tests"][place]
    name = "" if isinstance(test, str) else "input " if "input" in test else "args "
    text = " ".join(test.split()) if isinstance(test, str) else repr(test[name.strip()])
    return name + (text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


# Trials of reference answers by the grader, and of code tasks by their solutions.
SCREENS: Mapping[str, Callable[..., AbstractContextManager[RowFilter | None]]] = choices(
    "data.screen", {"none": nullcontext, "references": references_screen, "tests": _working_tests}
)
