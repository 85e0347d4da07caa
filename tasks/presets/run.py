"""Preset: the complete description of a run, read from TOML and overrides, and validated."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlcore.config.data import HardwareConfig, ModelConfig
from rlcore.config.distributed import DistributedConfig, Learning, distributed_errors
from rlcore.config.health import HealthConfig
from rlcore.config.sampling import EngineConfig, SamplingConfig
from rlcore.errors import ConfigError, RlcoreError
from rlcore.strict_config import NonNegativeInt, build_partly, config_error
from rlcore.tasks.kinds import StageConfig
from rlcore.tasks.presets.data import DatasetConfig, resolve_paths
from rlcore.tasks.presets.graph import AnyStage
from rlcore.tasks.presets.graph_validation import graph_errors
from rlcore.tasks.presets.peers import meant
from rlcore.tasks.presets.settings import BudgetConfig, EvaluationConfig, PromotionConfig, RetrainConfig, TrackingConfig
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.toml_files import read_toml

Section = TypeVar("Section")
_PRESET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAMED_BASE = "name a committed preset, or one of the same folder, without .toml"
_SECRET_FIX = (
    "name a variable of the environment (api_key_env, HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD) or a Prefect block"
)
_KEY = re.compile(r"[a-z_]+(\.\w+)*")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Complete description of a run.

    ``model`` is imported as ``base``. Stages name their starting checkpoints and rows, which determines their order.
    ``engine`` samples all completions; a section may name another engine.
    """

    name: str  # of the preset; registered models are `<name>-<stage>`
    seed: NonNegativeInt  # of all random numbers; another seed reruns every stage
    model: ModelConfig
    data: Mapping[str, DatasetConfig]
    evaluation: EvaluationConfig
    stages: Mapping[str, AnyStage] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    promotion: PromotionConfig | None = None
    retrain: RetrainConfig | None = None

    @property
    def errors(self) -> list[str]:
        """Errors in the combination of its sections, one line each, with the full key."""
        return [*graph_errors(self), *distributed_errors(self.distributed, _learners(self.stages), self.engine)]

    def engine_of(self, section: SamplingConfig | EvaluationConfig) -> EngineConfig:
        """Return the engine that a section names, or the run's."""
        return section.engine or self.engine

    def stage(self, name: str, kind: type[Section]) -> Section:
        """Return the stage ``name`` of a required kind: ``config.stage("grpo", RlStage)``.

        Raises:
            ConfigError: the preset has none.
        """
        found = self.stages.get(name)
        if not isinstance(found, kind):
            known = [each for each, stage in self.stages.items() if isinstance(stage, kind)]
            raise ConfigError(
                f"the preset {self.name} has no stage {name!r} of this kind",
                fix=f"name one of {', '.join(known) or 'none: add one under [stages]'}",
            )
        return found

    def section(self, name: str, kind: type[Section], *, where: str = "") -> Section:
        """Return a section that a preset may lack: ``config.section("promotion", PromotionConfig)``.

        Raises:
            ConfigError: the preset has none.
        """
        found = getattr(self, name)
        if not isinstance(found, kind):
            raise ConfigError(
                f"the preset {self.name} has no section [{name}]",
                where=where,
                fix=f"add [{name}]; presets that have it are in flows/presets",
            )
        return found


def _learners(stages: Mapping[str, StageConfig]) -> dict[str, Learning]:
    """Return the settings of the training stages that the section ``distributed`` applies to."""
    return {name: stage.settings for name, stage in stages.items() if stage.produces in ("checkpoint", "reward_model")}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A preset as far as it could be read. In ``config`` legal values stand in for wrong ones; None: there is none."""

    source: str
    config: RunConfig | None
    errors: tuple[str, ...]

    @property
    def whole(self) -> RunConfig:
        """The configuration; errors of keys and values are raised as one ConfigError."""
        if self.errors or self.config is None:
            raise config_error(self.errors, self.source)
        return self.config


def load_preset(path: Path, overrides: Sequence[str] = (), *, library: Path | None = None) -> RunConfig:
    """Return a valid preset, read by :func:`read_preset`.

    Raises:
        ConfigError: as :func:`read_preset`, with all errors of its keys and values, or of its graph.
    """
    return validated(read_preset(path, overrides, library=library).whole, str(path))


def validated(config: RunConfig, source: str) -> RunConfig:
    """Return ``config``, described by ``source``, if its graph is valid.

    Raises:
        ConfigError: it is not; with all errors.
    """
    if errors := config.errors:
        raise config_error(errors, source)
    return config


def read_preset(path: Path, overrides: Sequence[str] = (), *, library: Path | None = None) -> Draft:
    """Read a TOML preset and apply overrides such as ``stages.grpo.learning_rate=2e-6``.

    A preset with ``extends = "other"`` has only the differences from ``other.toml``, which is in the same folder or in
    the folder ``library``: tables are merged key by key, other values (lists too) are replaced. ``without`` lists
    removed keys: ``without = ["stages.ppo", "promotion"]``; as an override it removes keys of this preset.

    Relative paths of files start at the preset that names them; those of the presets in ``library`` and of overrides
    start at the current folder. A license belongs to the model next to it: a preset or override that names another
    model does not inherit it. ``requires`` lists keys that a preset leaves to those that extend it.
    Raises:
        ConfigError: unreadable file, malformed TOML or override, an address with a password.
    """
    written = _read_with_bases(path, library)
    document = copy.deepcopy(written)
    for override in overrides:
        apply_override(document, override)
    document = _located(document, Path(), None, document)
    if not any(override.startswith("model.license=") for override in overrides):
        _drop_old_license(written, document)
    _drop_keys(document, _key_list(document, "without", path), where=str(path))
    missing = _missing(document, _key_list(document, "requires", path))
    if secrets := list(_secret_errors(document, "")):
        raise config_error(secrets, str(path))
    config, errors = build_partly(RunConfig, document, hint=partial(meant, document))
    own = (*missing.values(), *(error for error in errors if not _follows(error, missing)))
    return Draft(source=str(path), config=config, errors=own)


def _read_with_bases(path: Path, library: Path | None) -> dict[str, Any]:
    """Return the document of a preset, merged into those that it extends, with paths from the current folder."""
    merged: dict[str, Any] = {}
    for file, document in read_chain(path, library).items():
        if document.pop("extends", None) is None:
            merged = _located(document, file.parent, library, document)
            continue
        inherited, own = merged, document.get("model")
        _drop_keys(inherited, _key_list(document, "without", file), where=str(file))
        merged = _merge(inherited, _located(document, file.parent, library, _merge(inherited, document)))
        if not isinstance(own, Mapping) or "license" not in own:
            _drop_old_license(inherited, merged)
    return merged


def read_chain(path: Path, library: Path | None) -> dict[Path, dict[str, Any]]:
    """Return the documents of a preset and of those that it extends, as in their files, by file, its own last.

    Raises:
        ConfigError: One cannot be read or is not TOML, or they extend each other.
    """
    chain: dict[Path, dict[str, Any]] = {}
    each: Path | None = path
    while each is not None:
        if each in chain:
            raise ConfigError("presets extend each other in a circle", where=" -> ".join(map(str, (*chain, each))))
        chain[each] = read_toml(each, what="preset")
        each = _base_of(chain[each], each, library)
    return dict(reversed(chain.items()))


def _base_of(document: Mapping[str, Any], path: Path, library: Path | None) -> Path | None:
    base = document.get("extends")
    if base is None:
        return None
    if not isinstance(base, str) or not _PRESET_NAME.fullmatch(base):
        raise ConfigError(
            f"extends = {base!r} is not the name of a preset",
            where=str(path),
            fix=_NAMED_BASE,
        )
    files = [folder / f"{base}.toml" for folder in (path.parent, library) if folder is not None]
    for file in files:
        if file.is_file():
            return file
    known = sorted({each.stem for file in files for each in file.parent.glob("*.toml")} - {path.stem})
    near = get_close_matches(base.removesuffix(".toml"), known)
    fix = f"did you mean {' or '.join(near)}?" if near else f"name one of {', '.join(known)}"
    raise ConfigError(f"extends = {base!r}: there is no such preset", where=str(path), fix=fix)


def _key_list(document: dict[str, Any], name: str, path: Path) -> list[str]:
    found = document.pop(name, [])
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        fix = f'write {name} = ["stages.ppo", "promotion"]'
        raise ConfigError(f"{name} = {found!r} is not a list of keys", where=str(path), fix=fix)
    return found


def _drop_old_license(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """Remove the license of ``old`` if the document ``new`` has another model."""
    before, after = old.get("model"), new.get("model")
    if not isinstance(before, Mapping) or not isinstance(after, dict):
        return
    if any(before.get(key) != after.get(key) for key in ("source", "path", "file")):
        after.pop("license", None)


def _missing(document: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    missing = {}
    model = document.get("model")
    has_path = not isinstance(model, Mapping) or model.get("source") != "scratch"
    for key in [key for key in keys if has_path or key != "model.path"]:
        node: Any = document
        *tables, last = key.split(".")
        for part in tables:
            node = node.get(part) if isinstance(node, Mapping) else None
        names = (last, "columns") if last == "adapter" else (last,)  # a mapping takes the place of an adapter
        if not isinstance(node, Mapping) or all(node.get(name) in (None, "") for name in names):
            missing[key] = f"{key}: missing; it has no default"
    return missing


def _located(document: dict[str, Any], folder: Path, library: Path | None, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve a document's paths; ``merged`` has the model's source if a base preset names it."""
    if library is not None and folder.resolve() == library.resolve():
        return resolve_paths(document, folder, source=None, is_shipped=True)
    model = merged.get("model")
    return resolve_paths(document, folder, source=model.get("source") if isinstance(model, Mapping) else None)


def _drop_keys(document: dict[str, Any], keys: Sequence[str], *, where: str) -> None:
    for key in keys:
        *parents, leaf = key.split(".")
        holder: Any = document
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, Mapping) else None
        if not isinstance(holder, dict) or leaf not in holder:
            text = f"without names {key!r}, which the extended preset does not have"
            raise ConfigError(text, where=where, fix="leave it out of the list")
        del holder[leaf]


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both_tables = {
        key: _merge(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **both_tables}


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one value of a preset's document in place: ``stages.ppo.rewards.0.weight=0.5``.

    Raises:
        ConfigError: The override is not of the form ``path=value``, or its path leads through a value or beyond a list.
    """
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form path.to.key=value")
    *parents, leaf = key.strip().split(".")
    node: Any = document
    for parent in parents:
        node = _list_item(node, parent, override) if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    if isinstance(node, list):
        raise ConfigError(f"override {override!r}: name an item of the list by its number, then its key")
    node[leaf] = _override_value(text)


def _override_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number or nesting beyond Python's bounds
        return text.strip()  # a bare word is a string: data.prompts.path=data/my.jsonl


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdecimal() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: {index!r} is not a number below {len(items)}")
    return items[int(index)]


def _secret_errors(node: Any, path: str) -> Iterator[str]:
    """Yield addresses with a password or a key: presets are stored with every result, in MLflow and in reports."""
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _secret_errors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, str) and has_secret(node):
        yield f"{path}: the address has a password or a key; {_SECRET_FIX}"


def collect_error(path: str, work: Callable[[], object], *, within: bool = False) -> list[str]:
    """Return the error of ``work`` as a line that begins with its key, or with ``path`` if it has none.

    ``within``: keys of its errors are within ``path``.
    """
    try:
        work()
    except RlcoreError as error:
        where, section = error.where, path.partition(".")[0]
        is_key = bool(_KEY.fullmatch(where))
        key = f"{path}.{where}" if within and is_key else where if where.startswith(f"{section}.") else path
        file = f" ({where})" if where and not is_key else ""
        return [f"{key}: {error.what}{file}" + (f"; {error.fix}" if error.fix else "")]
    return []


def _follows(error: str, missing: Collection[str]) -> bool:
    """Return True if an error follows from missing keys: it is of one, or names what its table misses."""
    key, _, what = error.partition(":")
    return key in missing or ("missing" in what and any(each.startswith(f"{key}.") for each in missing))
