"""Datasets from any source as gated Parquet files. The only file that imports ``datasets``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rlcore.config.data import tried
from rlcore.data_contracts.adapters import convert
from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.adapters.table import Kind
from rlcore.data_contracts.contracts import code_tasks
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate import data_gate
from rlcore.data_contracts.gate.data_gate import GateLimits, GateReport, GateResult
from rlcore.data_contracts.gate.overlap import SharedWords
from rlcore.data_contracts.gate.reading import Source, joined, read_source, require_file, source_of
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter
from rlcore.errors import ConfigError, DataError
from rlcore.tasks.presets.data import HUB, POLICY, DatasetConfig
from rlcore.tasks.steps.screens import SCREENS
from rlcore.tasks.store.artifacts import file_sha256
from rlcore.tasks.store.code_hash import closure_digest
from rlcore.tasks.store.storage import table_writer, write_bytes, write_json
from rlcore.types import Message

DatasetKind = Kind
_HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """Properties of a tokenizer that the gate needs; see :class:`rlcore.data_contracts.gate.token_budget.TokenMeter`.

    ``encode``: token ids of each text, never special tokens. ``prompt_lengths``: numbers of tokens of conversations,
    with their template and generation prompt; ``max_prompt_tokens``, ``max_text_tokens``: upper bounds of these
    numbers. ``special_tokens``: as text.
    """

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    prompt_lengths: Callable[[Sequence[Sequence[Message]]], Sequence[int]]
    max_prompt_tokens: Callable[[Sequence[Sequence[Message]]], Sequence[int]]
    max_text_tokens: Callable[[str], int]
    special_tokens: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Use:
    """Use of a dataset by the rest of a preset.

    ``evaluated``: evaluation prompts of other datasets. They are held out if the gate divides the rows; a source that
    has them in its ``train`` split is rejected. ``is_graded``: answers are compared with the reference answers, and
    rows with unusable ones are rejected.
    """

    evaluated: Sequence[Messages] = ()
    is_graded: bool = False


def prepare_dataset(
    kind: DatasetKind,
    config: DatasetConfig,
    *,
    seed: int,
    tokens: TokenView,
    folder: Path,
    use: Use | None = None,
) -> GateReport:
    """Gate rows into ``train.parquet``, ``eval.parquet``, ``quarantine.jsonl`` and ``report.json`` in ``folder``.

    Raises:
        ConfigError: unknown adapter or option, malformed hub path.
        DataError: an unreadable source, or a dataset that the gate rejects; then only report and quarantine are
            written.
        StorageError: the folder cannot be written.
    """
    check_options(kind, config)
    use, adapter = use or Use(), resolve_adapter(config)
    # Generated problems are all different but similar.
    keeps_apart = config.comparison.near_duplicates == "exclude" and not convert.is_generator(adapter)
    limits = GateLimits(
        num_train=config.num_train,
        num_eval=config.num_eval,
        max_tokens=config.max_tokens,
        max_quarantined=config.max_quarantined,
        evaluated=use.evaluated,
        seed=seed,
        is_exact=is_exact(config),
        keeps_apart=keeps_apart,
        shared_words=SharedWords(size=config.comparison.ngram_size, action=config.comparison.ngram_overlap),
    )
    with _contract_errors():
        source = _source(kind, adapter, config, seed)
        contract = code_tasks.CONTRACT if config.contract == "code_tasks" else convert.contract_of(adapter, kind)
        stream = convert.stream_of(source, kind, adapter=adapter, system=config.system_prompt)
    graded = "references" if use.is_graded and config.contract == "prompts" else "none"
    screen = SCREENS["tests" if contract is code_tasks.CONTRACT else graded]
    return _prepare(stream, contract, limits, tokens=tokens, folder=folder, screen=screen)


def prepare_source(
    kind: DatasetKind, source: Source, limits: GateLimits, *, adapter: str, tokens: TokenView, folder: Path
) -> GateReport:
    """Gate rows that are already read or generated; raise as :func:`prepare_dataset`."""
    with _contract_errors():
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
    tokens: TokenView,
    folder: Path,
    screen: Callable[[], AbstractContextManager[RowFilter | None]],
) -> GateReport:
    """Write the snapshot while reading the rows; report and quarantine always, the rows if the gate passes."""
    with ExitStack() as stack, _contract_errors():
        looked = stack.enter_context(screen())
        add = {split: stack.enter_context(table_writer(folder / f"{split}.parquet")) for split in ("train", "eval")}

        def sink(frame: pd.DataFrame) -> None:
            for split, write in add.items():
                write(frame[frame["split"] == split])

        result = data_gate.check(stream, contract, limits, meter=_meter(tokens), sink=sink, screen=looked)
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


def resolve_adapter(config: DatasetConfig) -> str:
    """Return the adapter in use: the fallback if there is one and ``path`` names no file.

    Raises:
        ConfigError: unknown adapter.
    """
    is_missing = bool(config.path) and not config.path.startswith(HUB) and not Path(config.path).exists()
    adapter = config.fallback if is_missing and config.fallback else config.adapter
    for name in {config.adapter, config.fallback, adapter} - {"", POLICY}:
        with _contract_errors(ConfigError):
            convert.is_generator(name)
    return adapter


def check_options(kind: DatasetKind, config: DatasetConfig) -> None:
    """Reject options that neither the adapter nor its fallback knows.

    Raises:
        ConfigError: naming the option.
    """
    names = [name for name in (config.adapter, config.fallback) if name]
    if POLICY in names:  # its options belong to the stage that samples
        return
    with _contract_errors(ConfigError):
        known = [convert.known_options(name, kind) for name in names]
    allowed = frozenset[str]().union(*(options for options, _ in known))
    takes_settings = any(settings for _, settings in known)
    unknown = [name for name in config.options if name not in allowed and not (takes_settings and "." in name)]
    if unknown:
        raise ConfigError(
            f"the adapter {' or '.join(map(repr, names))} has no option {unknown[0]!r}",
            where=f"{kind}.options",
            fix=f"it has: {', '.join(sorted(allowed)) or 'none'}",
        )


def source_digest(config: DatasetConfig) -> str:
    """Return the source of the rows, for cache keys: SHA-256 of the file, the hub's revision, or ``generated``.

    Two sources give both. An adapter named ``module:NAME`` adds the digest of its code.

    Raises:
        ConfigError: unknown adapter, malformed hub path.
        DataError: the file cannot be read, or is a pipe or a device.
    """
    adapter = resolve_adapter(config)
    if adapter == POLICY:
        return "generated"
    paths = [path for path in (config.path, config.eval_path) if path or not config.path]
    found = ["generated"] if convert.is_generator(adapter) else [_digest_of(path, adapter) for path in paths]
    return " ".join([*found, closure_digest(adapter.partition(":")[0])] if ":" in adapter else found)


def _digest_of(path: str, adapter: str) -> str:
    if path.startswith(HUB):
        return hub_parts(path)["revision"]
    try:
        with _contract_errors():
            require_file(Path(path))
        return file_sha256(Path(path))
    except OSError as error:
        raise DataError(
            f"cannot read the dataset: {error.strerror}",
            where=tried(path) if path else "path is empty",
            fix=f"set path to a file for the adapter {adapter!r}, or set fallback",
        ) from error


def _source(kind: DatasetKind, adapter: str, config: DatasetConfig, seed: int) -> Source:
    if convert.is_generator(adapter):
        known, takes_settings = convert.known_options(adapter, kind)
        options = {
            name: value for name, value in config.options.items() if name in known or (takes_settings and "." in name)
        }
        return convert.generate(
            kind, adapter, num_train=config.num_train, num_eval=config.num_eval, seed=seed, options=options
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


def hub_parts(path: str) -> dict[str, str]:
    """Return name, revision, subset and split of a hub path; empty or None if absent.

    Raises:
        ConfigError: it is malformed.
    """
    match = _HUB.fullmatch(path)
    if match is None:
        raise ConfigError(
            "the hub path is malformed",
            where=path,
            fix="write hub:org/name@revision, …@revision/subset, or …/subset:split; the revision is a commit of 40 "
            "hexadecimal digits",
        )
    return match.groupdict()


def _meter(tokens: TokenView) -> TokenMeter:
    def conversations(found: Sequence[Messages]) -> list[list[Message]]:
        return [[Message(role=turn["role"], content=turn["content"]) for turn in one] for one in found]  # type: ignore[arg-type]  # roles passed the contract

    return TokenMeter(
        encode=tokens.encode,
        prompt_lengths=lambda found: tokens.prompt_lengths(conversations(found)),
        max_prompt_tokens=lambda found: tokens.max_prompt_tokens(conversations(found)),
        max_text_tokens=tokens.max_text_tokens,
        special_tokens=tokens.special_tokens,
    )


@contextmanager
def _contract_errors(kind: type[DataError] | type[ConfigError] = DataError) -> Iterator[None]:
    """Turn errors of the contracts, which do not import rlcore, into rlcore's own."""
    try:
        yield
    except ContractError as error:
        raise kind(error.what, where=error.where, fix=error.fix) from error
