"""Erasure on request: what it finds and affects, and the certificate of what was deleted.

``erasures/<id>/`` in the state directory has ``found.json``, ``certificate.json`` and ``certificate.md``, and with a
key ``certificate.json.sig``. The id is a digest of the erased prompts' keyed digests, so that a repeated erasure
continues the same one. None of the files has a text of an erased row; ``unfinished.json`` has, and is removed last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.errors import DataError, StorageError
from rlcore.tasks.operations.erasure import (
    Erasure,
    erasure_of,
    read_erasure,
    redacted_report,
    remove,
    search,
    write_erasure,
)
from rlcore.tasks.operations.rows import Holding, find_holdings, forget, registered_versions
from rlcore.tasks.operations.wanted_rows import read_wanted, source_lines
from rlcore.tasks.pipeline.leases import held_leases, startup_lock
from rlcore.tasks.store.audit_log import local_actor, record_action
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.deny_list import deny, read_denied
from rlcore.tasks.store.markdown import code_cell, plain
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import open_shared_store
from rlcore.tasks.store.storage import read_json, write_bytes, write_json
from rlcore.tasks.tracking.database import database_of, require_made
from rlcore.tasks.tracking.lineage import read_records
from rlcore.tasks.tracking.model_descriptions import refresh_cards
from rlcore.tasks.tracking.past import renew_past
from rlcore.tasks.tracking.registry import find_number, read_tags, set_tags
from rlcore.tasks.tracking.runs import open_tracker

TAG = "erasure"
_CERTIFICATE, _UNFINISHED = "certificate.json", "unfinished.json"
_NOT_COVERED = (
    "the sources of the datasets, and copies of the state directory or of its files: exports, downloads, hubs",
    "backups, until they expire",
    "the weights of models that were trained before, and of the base model",
    "paraphrases, translations, and quotes of fewer than 24 letters and digits of a longer text",
    "texts of fewer than 8 letters and digits outside of tables: they identify nobody",
    "64-bit hashes of prompts in the data records of registered versions, which drift is measured with",
)
_SHARED = "state directories that use the same shared store: each needs the erasure, and has a deny list of its own"
_SERVER = "files that MLflow's server keeps outside of the state directory, and PostgreSQL's write-ahead log"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Erasure as found: the rows, their snapshots, and the number of copies by place.

    ``sources``: their lines in the datasets' sources, by path. ``certificate``: that of an erasure which is complete.
    """

    erasure: Erasure
    holdings: tuple[Holding, ...]
    places: Mapping[str, int]
    sources: Mapping[str, str]
    certificate: Path | None

    @property
    def models(self) -> tuple[str, ...]:
        """Versions that descend from the rows."""
        return tuple(dict.fromkeys(model for each in self.holdings for model in each.models))

    @property
    def presets(self) -> tuple[str, ...]:
        """Presets whose runs read the rows."""
        return tuple(dict.fromkeys(preset for each in self.holdings for preset in each.presets))


def find(home: Home, path: Path) -> Request:
    """Search everything that an erasure of the rows of a file would remove.

    Raises:
        DataError: the file cannot be read, or a line names no row.
    """
    records, tracker = read_records(home), open_tracker(home)
    wanted = read_wanted(path, records)
    holdings = find_holdings(home, records, wanted, registered_versions(tracker))
    erasure = erasure_of(home, records, wanted, holdings)
    if not erasure.prompts:
        raise DataError("no snapshot has rows with these ids", where=str(path), fix="give their prompts instead")
    denied = read_denied(home)
    certificate = _folder(home, map(denied.digest_of, erasure.prompts)) / _CERTIFICATE
    is_complete = certificate.is_file() and not holdings
    return Request(
        erasure=erasure,
        holdings=holdings,
        # without the rows that stay, of removed snapshots, quotes of them would be found too
        places={} if is_complete else search(home, erasure),
        sources=_sources(records, holdings, erasure),
        certificate=certificate if is_complete else None,
    )


def erase(home: Home, path: Path, *, reason: str, key: Path | None = None) -> Path:
    """Erase the rows of a file; return the path of the certificate. A repeat completes an erasure that was killed.

    Raises:
        DataError: as :func:`find`, or the reason quotes a row.
        StorageError: nothing was run here, a run is active, or a file cannot be changed.
    """
    require_made(home)
    with startup_lock(home):
        if held := held_leases(home):
            names = ", ".join(sorted(each.experiment for each in held))
            raise StorageError(
                f"runs are active here: {names}", where=str(home.leases), fix="wait until they have ended"
            )
        request = find(home, path)
        if request.erasure.quotes.are_in(reason):
            raise DataError(
                "the reason quotes an erased row", where="--reason", fix="name the request, not its content"
            )
        digests = deny(home, request.erasure.prompts)
        folder = _folder(home, digests)
        certificate, is_begun = folder / _CERTIFICATE, (folder / _UNFINISHED).is_file()
        if not certificate.is_file() or (not is_begun and request.holdings):
            details = {
                "erasure": folder.name,
                "reason": reason,
                "prompts": list(digests),
                "models": list(request.models),
            }
            record_action(home, "erase", "home", details)  # first: a kill leaves no removal without an entry
            certificate.unlink(missing_ok=True)
            request = _begin(home, folder, request)
            places = _with_earlier(folder / "found.json", request.places)
            remove(home, request.erasure)
            _remove_shared(places)
            _mark_versions(home, folder.name, request)
            document = _document(home, folder.name, request, places=places, digests=digests, reason=reason)
            _write(document, certificate, key)
        for holding in request.holdings:
            forget(home, holding.sha256, holding.prompts)
        (folder / _UNFINISHED).unlink(missing_ok=True)
    return certificate


def _folder(home: Home, digests: Iterable[str]) -> Path:
    return home.root / "erasures" / hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:12]


def _begin(home: Home, folder: Path, request: Request) -> Request:
    """Return the request with the erasure that a killed attempt began, or record that it begins."""
    unfinished = folder / _UNFINISHED
    if not unfinished.is_file():
        write_erasure(request.erasure, unfinished)
        return request
    erasure = read_erasure(unfinished)
    return replace(request, erasure=erasure, places=search(home, erasure))


def summary(request: Request) -> Iterator[str]:
    """Yield lines about what an erasure finds and affects."""
    if request.certificate:
        yield f"erased before: {request.certificate}"
    yield from (f"  {count:>7,}  {place}" for place, count in by_folder(request.places))
    yield f"rows: {len(request.erasure.prompts)} prompts, in {len(request.holdings)} snapshots"
    yield from (f"source, not touched: {path}: {lines}" for path, lines in request.sources.items())
    yield f"models that descend from them: {', '.join(request.models) or 'none'}"
    yield from (f"to train without them: rlcore run {preset} (or the path of its .toml)" for preset in request.presets)


def by_folder(places: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the number of copies by folder, with shortened digests, or by column of a database."""
    found: dict[str, int] = {}
    for place, count in places.items():
        parts = [part[:12] if len(part) >= 32 else part for part in place.split("/")]
        shown = place if ": " in place else "/".join(parts[:-1] if len(parts) > 1 else parts)
        found[shown] = found.get(shown, 0) + count
    return sorted(found.items())


def _sources(records: Iterable[Record], holdings: Sequence[Holding], erasure: Erasure) -> dict[str, str]:
    held = {each.sha256 for each in holdings}
    found: dict[str, str] = {}
    for record in records:
        if record.ref.sha256 in held:
            found |= source_lines(record, erasure.prompts)
    return found


def _with_earlier(path: Path, places: Mapping[str, int]) -> Mapping[str, int]:
    """Return the places with those that a killed attempt has found, and record them before anything is removed."""
    earlier: dict[str, int] = read_json(path) if path.is_file() else {}
    found = {**earlier, **{place: max(count, earlier.get(place, 0)) for place, count in places.items()}}
    write_json(found, path)
    return found


def _remove_shared(places: Iterable[str]) -> None:
    """Remove the files of artifacts from the shared store, where one is in use."""
    shared = open_shared_store()
    for place in places:
        if shared is not None and place.startswith("artifacts/"):
            shared.remove(place)


def _mark_versions(home: Home, name: str, request: Request) -> None:
    """Name the erasure in the tags and on the cards of the versions that descend from the rows, and redact records."""
    tracker = open_tracker(home)
    found = (find_number(tracker, *model.rsplit("/", 1)) for model in request.models)
    versions = [version for version in found if version]
    for version in versions:
        known = read_tags(tracker, version).get(TAG, "")
        if name not in known:
            text = f"{name} on {datetime.now(UTC):%Y-%m-%d}"
            set_tags(tracker, version, {TAG: f"{known}, {text}" if known else text})
        renew_past(home, tracker, version, partial(redacted_report, erasure=request.erasure))
    refresh_cards(home, tracker, versions)


def _document(
    home: Home, name: str, request: Request, *, places: Mapping[str, int], digests: Sequence[str], reason: str
) -> dict[str, Any]:
    left = search(home, request.erasure)
    return {
        "erasure": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "reason": reason,
        "actor": local_actor(),
        "prompts": list(digests),
        "snapshots": {each.sha256: {"train": each.train, "held_out": each.held_out} for each in request.holdings},
        "deleted": {place: count - left.get(place, 0) for place, count in places.items()},
        "left": left,
        "models": list(request.models),
        "presets": list(request.presets),
        "sources": dict(request.sources),
        "not_covered": [
            *_NOT_COVERED,
            *([] if database_of(home) else [_SERVER]),
            *([_SHARED] if open_shared_store() else []),
        ],
    }


def _write(document: Mapping[str, Any], path: Path, key: Path | None) -> None:
    """Write the certificate: its page and signature first, because it completes the erasure."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_bytes(_page(document).encode(), path.with_suffix(".md"))
    if key is not None:
        from rlcore.tasks.store.signatures import sign

        write_bytes(sign(text, key).encode(), path.with_name(f"{path.name}.sig"))
    write_bytes(text.encode(), path)


def _page(document: Mapping[str, Any]) -> str:
    """Return the certificate as Markdown."""
    places = [f"| {code_cell(place)} | {count} |" for place, count in by_folder(document["deleted"])]
    left = [f"- {plain(place)}: {count}" for place, count in document["left"].items()]
    sections = {
        f"# Erasure {document['erasure']}": f"{document['time']}, {plain(document['reason'])}. "
        f"{len(document['prompts'])} prompts are on the deny list of the data gate.",
        "## Deleted": "\n".join(["| place | copies |", "|---|---|", *places]) if places else "Nothing was found.",
        "## Found again by a second search": "\n".join(left) or "Nothing.",
        "## Models that descend from the rows": _items(document["models"]),
        "## Presets to run again": _items(f"rlcore run {preset}" for preset in document["presets"]),
        "## Not covered": _items([*document["not_covered"], *map(": ".join, document["sources"].items())]),
    }
    return "\n\n".join(f"{title}\n\n{text}" for title, text in sections.items()) + "\n"


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"- {plain(text)}" for text in texts) or "None."
