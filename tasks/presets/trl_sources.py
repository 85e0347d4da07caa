"""The starting checkpoint and the rows of a TRL configuration, as keys of a preset."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.tasks.presets.data import HUB
from rlcore.tasks.presets.trl_settings import TrlSettings

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMATS = (".jsonl", ".json", ".parquet")
_LONGEST = 1 << 20
_HELD_OUT = ("test", "validation", "eval")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows: paths as a preset names them, and their number, 0 if they are not on this machine."""

    path: str = ""
    eval_path: str = ""
    num_rows: int = 0
    notes: tuple[str, ...] = ()


def model_of(trl: TrlSettings, folder: Path, errors: list[str]) -> dict[str, Any]:
    """Return the keys of ``[model]``."""
    named = trl.get("model_name_or_path")
    if not named:
        errors.append("model_name_or_path: required, but missing")
        return {}
    is_folder = (folder / str(named)).is_dir()
    revision = str(trl.get("model_revision") or "")
    found: dict[str, Any] = {"model.source": "folder" if is_folder else "hub", "model.path": str(named)}
    if not is_folder:
        found["model.revision"] = revision if _COMMIT.fullmatch(revision) else ""
    if trl.get("eos_token"):
        found["model.extra_eos"] = [trl.get("eos_token")]
    return found


def max_positions(trl: TrlSettings, folder: Path) -> int:
    """Return the longest text that a model on this machine reads, in tokens; for others, one that limits nothing."""
    try:
        config = json.loads((folder / str(trl.get("model_name_or_path")) / "config.json").read_bytes())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return _LONGEST


def source_of(trl: TrlSettings, folder: Path, errors: list[str]) -> Source:
    """Return where the rows are: files of a folder, one file of ``datasets``, or a dataset of the hub."""
    mixture = trl.get("datasets")
    if mixture:
        return _of_mixture(mixture, folder, errors)
    named = trl.get("dataset_name")
    if not named:
        errors.append("dataset_name: required, but missing")
        return Source()
    place = folder / str(named)
    if not place.exists():
        return Source(
            path=f"{HUB}{named}@",
            notes=("data: write the 40 hex digits of the dataset's commit after @, and the adapter of its layout",),
        )
    if place.is_file():
        return Source(path=str(named), num_rows=_count(place))
    files = sorted(each for each in place.rglob("*") if each.suffix in _FORMATS)
    train = [each for each in files if "train" in each.name]
    held_out = [each for each in files if any(word in each.name for word in _HELD_OUT)]
    if len(train) != 1:
        errors.append(f"dataset_name = {named!r}: has {len(train)} files of training rows, and a preset names one")
        return Source()
    paths = [str(Path(named) / each.relative_to(place)) for each in (*train, *held_out[:1])]
    return Source(path=paths[0], eval_path=paths[1] if held_out else "", num_rows=_count(train[0]))


def layout_of(file: Path, own: str) -> str:
    """Return the adapter that reads a file's rows as those of the adapter ``own``, or ``own`` if none is known."""
    from rlcore.data_contracts.adapters.recognition import fits
    from rlcore.data_contracts.errors import ContractError
    from rlcore.data_contracts.gate.reading import read_source

    with suppress(ContractError):  # the plan says what is wrong with it
        return next((fit.adapter for fit in fits(read_source(file)) if own in fit.kinds), own)
    return own


def _of_mixture(mixture: Any, folder: Path, errors: list[str]) -> Source:
    entry = mixture[0] if isinstance(mixture, list) and len(mixture) == 1 else None
    files = entry.get("data_files") if isinstance(entry, Mapping) else None
    files = files.get("train") if isinstance(files, Mapping) else files
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    if not isinstance(files, str):
        errors.append("datasets: a preset takes one entry with one file in data_files from here; add others by hand")
        return Source()
    place = folder / files
    return Source(path=files, num_rows=_count(place) if place.is_file() else 0)


def _count(file: Path) -> int:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file).num_rows)
    with file.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)
