"""Datasets from anywhere to gated Parquet files. The one file that imports ``datasets``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_contracts import code_tasks, convert, gate
from data_contracts.adapters import Kind
from data_contracts.budget import TokenMeter
from data_contracts.contract import Contract
from data_contracts.errors import ContractError
from data_contracts.gate import Candidates, GateLimits, GateReport, GateResult
from data_contracts.reading import Source, joined, read_source, require_file, source_of
from rlcore.config.data import tried
from rlcore.errors import ConfigError, DataError
from rlcore.types import Message
from tasks.home.artifacts import file_sha256
from tasks.home.storage import write_bytes, write_json, write_table
from tasks.preset.data import HUB, POLICY, DatasetConfig
from tasks.steps.code_tasks import without_broken_tests

DatasetKind = Kind
GENERATED = "generated"
_HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """What the gate needs to know of a tokenizer.

    ``encode``: token ids of a text, control tokens never among them. ``special_tokens``: the control tokens, as text.
    ``prompt_length``: number of tokens of a conversation, with its template and generation prompt.
    """

    encode: Callable[[str], Sequence[int]]
    special_tokens: Sequence[str]
    prompt_length: Callable[[Sequence[Message]], int]


def prepare_dataset(
    kind: DatasetKind,
    config: DatasetConfig,
    *,
    seed: int,
    tokens: TokenView,
    folder: Path,
    forbidden_prompts: frozenset[str] = frozenset(),
) -> GateReport:
    """Rows, gated: ``train.parquet``, ``eval.parquet``, ``quarantine.jsonl`` and ``report.json`` in ``folder``.

    ``forbidden_prompts``: hashes of prompts that another dataset evaluates on (``prompt_hashes.py``). Where we divide
    the rows they are held out; a source that has them in its own ``train`` split is refused.

    Raises:
        ConfigError: unknown adapter or option, malformed hub path.
        DataError: an unreadable source, or a dataset that the gate refuses: all but its rows is written.
        StorageError: the folder cannot be written.
    """
    check_options(kind, config)
    limits = GateLimits(
        num_train=config.num_train,
        num_eval=config.num_eval,
        max_tokens=config.max_tokens,
        max_quarantined=config.max_quarantined,
        forbidden_prompts=forbidden_prompts,
        seed=seed,
    )
    adapter = resolve_adapter(config)
    with _contract_errors():
        source = _source(kind, adapter, config, seed)
        contract = code_tasks.CONTRACT if config.contract == "code_tasks" else convert.contract_of(adapter, kind)
        candidates = convert.candidates(source, kind, limits, adapter=adapter, system=config.system)
    return _prepare(candidates, contract, limits, tokens=tokens, folder=folder)


def prepare_source(
    kind: DatasetKind, source: Source, limits: GateLimits, *, adapter: str, tokens: TokenView, folder: Path
) -> GateReport:
    """Gate rows that are already read or made; raises what :func:`prepare_dataset` raises."""
    with _contract_errors():
        candidates = convert.candidates(source, kind, limits, adapter=adapter)
        contract = convert.contract_of(adapter, kind)
    return _prepare(candidates, contract, limits, tokens=tokens, folder=folder)


def _prepare(
    candidates: Candidates, contract: Contract, limits: GateLimits, *, tokens: TokenView, folder: Path
) -> GateReport:
    with _contract_errors():
        if contract is code_tasks.CONTRACT:
            candidates = without_broken_tests(candidates)
        result = gate.check(candidates, contract, limits, meter=_meter(tokens))
    _write(result, folder)
    return result.report


def resolve_adapter(config: DatasetConfig) -> str:
    """The adapter in use: the fallback when there is one and ``path`` names no file.

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
    """Refuse options that neither the adapter nor its fallback knows.

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
    """The source of the rows, for cache keys: SHA-256 of the file, the hub's revision, or ``generated``.

    Of two sources, both.

    Raises:
        ConfigError: unknown adapter, malformed hub path.
        DataError: the file cannot be read, or is a pipe or a device.
    """
    adapter = resolve_adapter(config)
    if adapter == POLICY or convert.is_generator(adapter):
        return GENERATED
    return " ".join(_digest_of(path, adapter) for path in (config.path, config.eval_path) if path or not config.path)


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
    """A split of a dataset on the hub, ``train`` unless the path names one, at one commit; no code of it is run."""
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
    return source_of(path, list(loaded))


def hub_parts(path: str) -> dict[str, str]:
    """Name, revision, subset and split that a hub path names; empty or None where it does not.

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
    def prompt_length(messages: list[dict[str, str]]) -> int:
        return tokens.prompt_length([Message(role=turn["role"], content=turn["content"]) for turn in messages])  # type: ignore[arg-type]  # roles passed the contract

    return TokenMeter(encode=tokens.encode, prompt_length=prompt_length, special_tokens=tokens.special_tokens)


def _write(result: GateResult, folder: Path) -> None:
    """Write the report and the refused rows; the accepted rows only if the gate has passed."""
    lines = [json.dumps(one.to_json(), ensure_ascii=False) + "\n" for one in result.quarantine]
    write_bytes("".join(lines).encode("utf-8"), folder / "quarantine.jsonl")
    write_json(result.report.to_json(), folder / "report.json")
    with _contract_errors():
        result.report.require_passed(
            where=result.report.source,
            fix=f"the refused rows are in {folder / 'quarantine.jsonl'}, the counts in {folder / 'report.json'}",
        )
    for split in ("train", "eval"):
        write_table(result.kept[result.kept["split"] == split], folder / f"{split}.parquet")


@contextmanager
def _contract_errors(kind: type[DataError] | type[ConfigError] = DataError) -> Iterator[None]:
    """Turn errors of the contracts, which do not import rlcore, into rlcore's own."""
    try:
        yield
    except ContractError as error:
        raise kind(error.what, where=error.where, fix=error.fix) from error
