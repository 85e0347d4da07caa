"""Source of a dataset: its adapter and options, and the digest by which a stage's key counts it."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlcore.config.data import tried
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.files import require_file, row_files
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.tasks.presets.data import HUB, POLICY, DatasetConfig
from rlcore.tasks.store.code_hash import closure_digest, source_digests
from rlcore.tasks.store.remembered import remembered
from rlcore.tasks.store.storage import file_sha256

_CONVERT = "rlcore.data_contracts.adapters.convert"
_TABLE = "rlcore.data_contracts.adapters.table"
_HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)


def resolve_adapter(config: DatasetConfig) -> str:
    """Return the adapter in use: the fallback if there is one and ``path`` names no file.

    Raises:
        ConfigError: unknown adapter.
    """
    is_missing = bool(config.path) and not config.path.startswith(HUB) and not has_files(config.path)
    adapter = config.fallback if is_missing and config.fallback else config.reader
    for name in {config.reader, config.fallback, adapter} - {"", POLICY}:
        with contract_errors(ConfigError):
            is_generated(name)
    return adapter


def ignored_path(config: DatasetConfig) -> str:
    """Return the error of a path beside an adapter that generates its rows; "" if there is none.

    Raises:
        ConfigError: unknown adapter.
    """
    adapter = resolve_adapter(config)
    if not config.path or adapter in (POLICY, config.fallback) or not is_generated(adapter):
        return ""
    fix = 'set adapter to the layout of the file, or path = ""'
    return f"path = {config.path!r}: the adapter {adapter!r} reads no file; {fix}"


def is_generated(adapter: str) -> bool:
    """Return True if an adapter generates its rows, remembered as long as its code is the same.

    Raises:
        ContractError: unknown adapter.
    """
    if _CONVERT in sys.modules:  # its import is what remembering saves
        from rlcore.data_contracts.adapters import convert

        return convert.is_generator(adapter)
    return _makes_rows(adapter, adapter_code(adapter))


def adapter_code(adapter: str) -> str:
    """Return a digest of an adapter's code."""
    try:
        return closure_digest(adapter.partition(":")[0] if ":" in adapter else _TABLE)
    except StorageError:  # no such module, as its import will say
        return ""


@remembered
def _makes_rows(adapter: str, code: str) -> bool:
    from rlcore.data_contracts.adapters import convert  # brings pandera

    return convert.is_generator(adapter)


def check_options(config: DatasetConfig) -> None:
    """Reject options that neither the adapter nor its fallback knows.

    Raises:
        ConfigError: naming the option.
    """
    names = [name for name in (config.reader, config.fallback) if name]
    if POLICY in names:  # its options belong to the stage that samples
        return
    with contract_errors(ConfigError):
        known = [_known_options(name, config.kind, adapter_code(name)) for name in names]
    allowed = set[str]().union(*(options for options, _ in known))
    takes_settings = any(settings for _, settings in known)
    unknown = [name for name in config.options if name not in allowed and not (takes_settings and "." in name)]
    if unknown:
        raise ConfigError(
            f"the adapter {' or '.join(map(repr, names))} has no option {unknown[0]!r}",
            where=f"{config.kind}.options",
            fix=f"it has: {', '.join(sorted(allowed)) or 'none'}",
        )


@remembered
def _known_options(adapter: str, kind: Kind, code: str) -> tuple[list[str], bool]:
    from rlcore.data_contracts.adapters import convert

    options, takes_settings = convert.known_options(adapter, kind)
    return sorted(options), takes_settings


def source_digest(config: DatasetConfig) -> Mapping[str, str]:
    """Return the sources of the rows by name, for cache keys: SHA-256 of the file, or the hub's revision.

    An adapter named ``module:NAME`` adds its code. Rows that are generated or sampled have no other source.

    Raises:
        ConfigError: unknown adapter, malformed hub path.
        DataError: the file cannot be read, or is a pipe or a device.
    """
    adapter = resolve_adapter(config)
    if adapter == POLICY:
        return {}
    paths = [path for path in (config.path, config.eval_path) if path or not config.path]
    found = [] if is_generated(adapter) else [_digest_of(path, adapter) for path in paths]
    return by_name([*found, *(source_digests(adapter.partition(":")[0]) if ":" in adapter else [])])


def _digest_of(path: str, adapter: str) -> tuple[str, str]:
    if path.startswith(HUB):
        return path, hub_parts(path)["revision"]
    try:
        return Path(path).name, rows_sha256(path)
    except OSError as error:
        raise DataError(
            f"cannot read the dataset: {error.strerror}",
            where=tried(path) if path else "path is empty",
            fix=f"set path to a file for the adapter {adapter!r}, or set fallback",
        ) from error


def has_files(path: str) -> bool:
    """Return True if a path names files of rows: one, a pattern that matches some, or a folder."""
    return bool(path) and (Path(path).is_dir() or any(each.exists() for each in row_files(path)))


def rows_sha256(path: str) -> str:
    """Return the SHA-256 of a file of rows; of several, that of their digests in their order.

    Raises:
        DataError: a pipe or a device, a folder of several splits.
        OSError: a file cannot be read.
    """
    with contract_errors():
        files = row_files(path)
        for each in files:
            require_file(each)
    if len(files) == 1:
        return file_sha256(files[0])
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


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


def hub_snapshot(path: str) -> Path | None:
    """Return the folder of a dataset's revision in the hub's cache on this machine; None if it has none.

    Raises:
        ConfigError: the hub path is malformed.
    """
    parts = hub_parts(path)
    from huggingface_hub import constants

    name = "--".join(("datasets", *parts["name"].split("/")))
    folder = Path(constants.HF_HUB_CACHE) / name / "snapshots" / parts["revision"]
    return folder if folder.is_dir() else None


def by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the digests of files by name; files of one name share an entry."""
    found: dict[str, str] = {}
    for name, digest in dict.fromkeys(pairs):
        found[name] = f"{found[name]} {digest}" if name in found else digest
    return found


@contextmanager
def contract_errors(kind: type[DataError] | type[ConfigError] = DataError) -> Iterator[None]:
    """Turn errors of the contracts, which do not import rlcore, into rlcore's own."""
    try:
        yield
    except ContractError as error:
        raise kind(error.what, where=error.where, fix=error.fix) from error
