"""Settings of a TRL trainer, read from its file and checked against the table of peers' keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml

from rlcore.errors import ConfigError
from rlcore.tasks.presets.peers import KINDS, PeerKey, peer_keys, without_effect

_SHOWN = 6  # keys of another library
TRAINERS = tuple(name for name in KINDS if name != "ppo")  # TRL has no command for PPO


@dataclass(frozen=True)
class TrlSettings:
    """Settings of ``trainer``, as its file has them; :meth:`get` fills in TRL's defaults."""

    trainer: str
    written: Mapping[str, Any]

    @cached_property
    def rows(self) -> Mapping[str, PeerKey]:
        """The trainer's rows of the table, by TRL's key."""
        return {row.name: row for row in peer_keys() if row.peer == "trl" and self.trainer in row.trainers}

    def get(self, name: str) -> Any:
        """Return a value with the type of TRL's default; None if neither the file nor TRL sets it."""
        default = self.rows[name].defaults.get(self.trainer) if name in self.rows else None
        value = self.written.get(name)
        return default if value is None else _as_number(value, default)

    def integer(self, name: str) -> int:
        """Return a value that is a whole number; 0 if nothing sets it."""
        return int(self.get(name) or 0)

    @property
    def errors(self) -> Iterator[str]:
        """Keys that are no trainer's, and values that a preset cannot have, a line each."""
        for name, value in self.written.items():
            row = self.rows.get(name)
            if row is None:
                yield from self._errors_of_other(name)
            elif row.only is not None and value is not None and not _is_among(self.get(name), row.only):
                values = " or ".join(map(repr, row.only)) or "unset"
                yield f"{name} = {value!r}: a preset has no counterpart, only {values}" + (
                    f" ({row.note})" if row.note else ""
                )

    def has_other_default(self, name: str) -> bool:
        """Return True if the file leaves a key out whose default a preset cannot have."""
        only, default = self.rows[name].only, self.rows[name].defaults.get(self.trainer)
        is_used = self.get("use_peft") or not name.startswith("lora_")
        return name not in self.written and bool(only and is_used) and default not in (None, *(only or ()))

    @property
    def left_out(self) -> list[str]:
        """Keys of the file without effect on the weights."""
        return [name for name in self.written if name not in self.rows or self.rows[name].ignored]

    def _errors_of_other(self, name: str) -> Iterator[str]:
        if any(fnmatch(name, pattern) for pattern in without_effect()):
            return
        others = [trainer for row in peer_keys() if row.peer == "trl" and row.name == name for trainer in row.trainers]
        if others:
            yield f"{name}: a key of TRL's {' and '.join(dict.fromkeys(others))}, not of {self.trainer}"
        else:
            yield f"{name}: unknown; it may change the training"


def read_settings(file: Path, trainer: str) -> TrlSettings:
    """Read a YAML or JSON file as ``trl grpo --config`` takes it; an empty ``trainer`` is found by the keys.

    Raises:
        ConfigError: the file cannot be read, is no table, or fits several trainers.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(file)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file is neither YAML nor JSON: {error}", where=str(file)) from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigError("the file is no table of TRL's keys", where=str(file), fix="write key: value in each line")
    _require_trl(document, file)
    found = trainer or _trainer_of(cast("dict[str, Any]", document), file)
    if found not in TRAINERS:
        raise ConfigError(f"unknown trainer {found!r}", where="--trainer", fix=f"one of {', '.join(TRAINERS)}")
    return TrlSettings(found, {key: value for key, value in document.items() if key != "trainer"})


def _require_trl(document: Mapping[str, Any], file: Path) -> None:
    """Refuse the configuration of another library: most of its keys are none of TRL's."""
    known = {row.name for row in peer_keys() if row.peer == "trl"} | {"trainer"}
    other = [key for key in document if key not in known and not any(fnmatch(key, each) for each in without_effect())]
    other += [key for key, value in document.items() if key == "trainer" and not isinstance(value, str)]
    if 2 * len(other) > len(document):
        raise ConfigError(
            f"from-trl reads configurations of TRL alone, and {len(other)} of {len(document)} keys are none of TRL's: "
            f"{', '.join(other[:_SHOWN])}",
            where=str(file),
            fix="copy a preset, and rename keys: rlcore plan names our key for each of verl's (docs/coming-from.md)",
        )


def _trainer_of(document: Mapping[str, Any], file: Path) -> str:
    """Return the one trainer that has all of the file's keys."""
    rows = [row for row in peer_keys() if row.peer == "trl"]
    named = {row.name for row in rows} & document.keys()
    others = {each: sorted(named - {row.name for row in rows if each in row.trainers}) for each in TRAINERS}
    fitting = [trainer for trainer, lacking in others.items() if not lacking]
    if len(fitting) != 1:
        lacks = "; ".join(f"{each} has no {', '.join(lacking)}" for each, lacking in others.items())
        raise ConfigError(
            f"the keys fit {', '.join(fitting) or 'none'} of TRL's trainers{'' if fitting else f': {lacks}'}",
            where=str(file),
            fix=f"name it: --trainer {' or '.join(fitting or TRAINERS)}",
        )
    return fitting[0]


def _as_number(value: Any, default: Any) -> Any:
    """Return a number that YAML took for a text: 1e-6 has no dot."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
        return int(value) if isinstance(default, int) and value.is_integer() else value
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _is_among(value: Any, only: tuple[Any, ...]) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(
        any(
            each == known
            or (isinstance(each, float) and isinstance(known, float | int) and math.isclose(each, known, abs_tol=1e-12))
            for known in only
        )
        for each in values
    )
