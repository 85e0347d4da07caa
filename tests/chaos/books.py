"""Records of a home as lines that do not depend on the times and numbers of attempts."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

_LEFT = ("*.tmp", "*.lock", "*.new", ".tmp-*", ".damaged-*", "*-journal", "work/*", "leases/*")
_ID = re.compile(r"m-[0-9a-f]{32}|[0-9a-f]{64}|[0-9a-f]{32}|(?<=/)[0-9a-f]{12}(?=[/.])")
_KEPT = ("restarts", "lease", "prefect.", "mlflow.user", "mlflow.source")  # tags that tell of attempts
_TIMED = re.compile(r"time|second|hours|memory|per_s|throughput|tokens_per|share_of|audit/")


def books(home: Path) -> list[str]:
    """Everything that an undisturbed run and one of many attempts have to agree about, sorted."""
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        repeated = _repeated(database)
        lines = [*_runs(database, repeated), *_registered(database)]
    return sorted([*lines, *_results(home), *_files(home, repeated)])


def differences(expected: list[str], found: list[str]) -> list[str]:
    wanted, had = Counter(expected), Counter(found)
    return [f"- {line}" for line in (wanted - had).elements()] + [f"+ {line}" for line in (had - wanted).elements()]


def repeated_points(home: Path) -> list[str]:
    query = "SELECT name, key, step FROM metrics JOIN runs USING (run_uuid) GROUP BY run_uuid, key, step"
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        found = database.execute(f"{query} HAVING count(*) > 1").fetchall()
    return [f"run {name}: metric {key} at {step} more than once" for name, key, step in found]


def _stages(tags: Mapping[str, str]) -> dict[str, str]:
    return {tag: value.partition(":")[0] for tag, value in tags.items() if tag.startswith("stage.")}


def _repeated(database: sqlite3.Connection) -> set[str]:
    """Return the runs of commands that were started again although they had finished."""
    tags = _named(database, "SELECT run_uuid, key, value FROM tags")
    finished = database.execute("SELECT run_uuid FROM runs WHERE status = 'FINISHED'").fetchall()
    return {run for (run,) in finished if set(_stages(tags.get(run, {})).values()) == {"cached"}}


def _runs(database: sqlite3.Connection, repeated: set[str]) -> Iterator[str]:
    tags = _named(database, "SELECT run_uuid, key, value FROM tags")
    for run, name, status in database.execute("SELECT run_uuid, name, status FROM runs").fetchall():
        own = tags.get(run, {})
        stages = _stages(own)
        if run in repeated:
            continue
        lines = [status, *(f"tag {tag}" for tag in own if not tag.startswith(_KEPT)), *_logged(database, run)]
        lines += [f"{tag} {value}" for tag, value in stages.items()]
        lines += ["no parent"] if "stage_key" in own and own.get("mlflow.parentRunId") not in tags else []
        shown = name if "stage_key" in own else "of the flow"  # Prefect makes its name up
        yield from (f"run {shown}: {line}" for line in lines)


def _logged(database: sqlite3.Connection, run: str) -> Iterator[str]:
    for key, step, value in database.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", (run,)):
        yield f"metric {key} at {step}" + ("" if _TIMED.search(key) else f": {value:.12g}")
    for key, value in database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)):
        yield f"parameter {key} {value}"
    for kind, column in (("inputs", "destination_id"), ("inputs", "source_id"), ("trace_request_metadata", "value")):
        (count,) = database.execute(f"SELECT count(*) FROM {kind} WHERE {column} = ?", (run,)).fetchone()
        yield f"{count} {kind} by {column}"


def _registered(database: sqlite3.Connection) -> Iterator[str]:
    for name, version, words in database.execute("SELECT name, version, description FROM model_versions"):
        yield f"version {name}/{version}: {'described' if words else 'no description'}"
    for row in database.execute("SELECT name, alias, version FROM registered_model_aliases"):
        yield f"alias {' '.join(map(str, row))}"
    for name, version, tag in database.execute("SELECT name, version, key FROM model_version_tags"):
        yield f"version {name}/{version}: tag {tag}"
    for name, tag, value in database.execute("SELECT name, key, value FROM registered_model_tags"):
        yield f"registered {name}: tag {tag.partition('.')[0]} {value}"  # the rest is digests
    for name, status in database.execute("SELECT name, status FROM logged_models"):
        yield f"logged model {name}: {status}"
    (count,) = database.execute("SELECT count(*) FROM logged_model_metrics").fetchone()
    yield f"{count} metrics of logged models"
    (count,) = database.execute("SELECT count(*) FROM trace_info").fetchone()
    yield f"{count} traces"


def _results(home: Path) -> Iterator[str]:
    for path in home.glob("cache/*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        stage, folder = path.parent.name, home / record["ref"]["uri"]
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            same = file.suffix in (".safetensors", ".parquet", ".jsonl") and file.stem != "answers"
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12] if same else ""
            yield f"result {stage}: {file.relative_to(folder)} {digest}".rstrip()


def _files(home: Path, repeated: set[str]) -> Iterator[str]:
    found = {path for pattern in _LEFT for path in home.rglob(pattern) if home / "prefect" not in path.parents}
    yield from (f"left: {_ID.sub('*', str(path.relative_to(home)))}" for path in found)
    for folder in ("artifacts", "cache", "pages", "mlartifacts", "reports"):
        for path in (home / folder).rglob("*"):
            if path.is_file() and repeated.isdisjoint(path.parts):
                yield f"file: {_ID.sub('*', str(path.relative_to(home)))}"


def _named(database: sqlite3.Connection, query: str) -> Mapping[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for owner, name, value in database.execute(query):
        found.setdefault(owner, {})[name] = value
    return found
