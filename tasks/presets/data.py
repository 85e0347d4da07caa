"""Settings of datasets, and locations of the files that a preset names."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlcore.config.data import FILE_SOURCES
from rlcore.data_contracts.adapters.expressions import Kind, parse_columns
from rlcore.data_contracts.gate.files import row_files
from rlcore.errors import ConfigError
from rlcore.strict_config import INLINE, Fraction, PositiveInt, Scalar

COLUMNS = "columns"  # adapter of a mapping; equal to rlcore.data_contracts.adapters.convert
POLICY = "policy"  # adapter of pairs that a policy samples
HUB = "hub:"
_MEASURES = 2  # problems; an accuracy on one has no interval
_FEWEST_WORDS = 8  # equal to rlcore.data_contracts.gate.eval_leakage
# Tables of a preset that name files, and the keys that do; first those whose files shipped presets have next to them.
_SHIPPED = ((("stages", "*"), ("folder",)), (("stages", "*", "sampling", "agent"), ("files", "sandbox_read")))
_PATHS = (
    (("data", "*"), ("path", "eval_path")),
    (("model",), ("chat_template",)),
    (("stages", "*", "sampling", "episodes"), ("search_corpus",)),
    (("stages", "*", "rewards", "*", "options"), ("template",)),
    (("evaluation", "verifiers", "*", "options"), ("template",)),
    *_SHIPPED,
)


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """Comparison of a dataset's texts, and the action on training rows that resemble an evaluation prompt."""

    # when texts count as equal: `loose` ignores case, blanks, invisible characters, punctuation next to words and
    # lookalikes, not operators and numbers; `exact` compares every character, as code may need
    compare: Literal["loose", "exact"] = "loose"
    # training prompts that differ from an evaluation prompt by about a word, or have one in their history: `exclude`
    # holds them out, or quarantines them if the source divides its rows; `ignore`: no search
    near_duplicates: Literal["exclude", "ignore"] = "exclude"
    # training rows that share `ngram_size` consecutive words with an evaluation prompt of any dataset: `warn` counts
    # them, `quarantine` rejects the rows, `refuse` the dataset
    ngram_overlap: Literal["warn", "quarantine", "refuse"] = "warn"
    ngram_size: PositiveInt = 13  # words; a shorter prompt of 8 words or more counts whole

    def __post_init__(self) -> None:
        if self.ngram_size < _FEWEST_WORDS:
            raise ConfigError(f"ngram_size must be at least {_FEWEST_WORDS}: fewer words are a phrase, and no leak")


@dataclass(frozen=True, kw_only=True)
class MappingConfig:
    """Columns of a source that a dataset uses. All columns of a row of prompts reach rewards (``rollout.row``)."""

    # from each part of a row to the source's columns: `prompt = 'problem'`, `reference = 'extra_info.answer'`, `task =
    # '=math'`; docs/layouts.md has the language
    columns: Mapping[str, Scalar] = field(default_factory=dict)
    drop_columns: tuple[str, ...] = ()  # columns of prompts that rewards must not read
    # column with the document of each row; drift then counts documents, whose rows are not independent
    group_column: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Dataset: source of its rows, numbers of rows, and limits of its gate.

    A tenth of the prompts is held out, by their hashes, unless each row has a column ``split`` (``train`` or ``eval``),
    or ``eval_path`` is given.
    """

    contract: Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]  # row type
    adapter: str = ""  # function that converts the source to contract columns; or give `columns`
    mapping: MappingConfig = field(default_factory=MappingConfig, metadata=INLINE)
    # file (JSONL, JSON array, Parquet, CSV, TSV), pattern or folder of such files, or `hub:org/name@revision`; empty
    # for adapters that generate their rows
    path: str = ""
    eval_path: str = ""  # source of the held-out rows; then all rows of `path` are for training
    fallback: str = ""  # adapter that is used if `path` does not exist
    policy: str = ""  # with adapter `policy`: checkpoint from which pairs are sampled and graded
    num_train: PositiveInt  # most training rows that are used; moves none to the other side
    num_eval: PositiveInt  # most held-out rows that are used
    max_tokens: PositiveInt  # token budget of one row (prompt + completion)
    max_quarantined: Fraction = 0.01  # largest fraction of rows that may break the contract
    system_prompt: str = ""  # system prompt of conversations that have none; empty: the model's
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig, metadata=INLINE)
    options: Mapping[str, Scalar] = field(default_factory=dict)  # options of the adapter

    def __post_init__(self) -> None:
        if not self.adapter and not self.mapping.columns:
            raise ConfigError("adapter is missing: name one, or give columns such as { prompt = 'question' }")
        if self.adapter and self.mapping.columns:
            raise ConfigError(f"adapter = {self.adapter!r} and columns are both given: keep one; adapter = '' drops it")
        try:
            _ = self.mapping.columns and parse_columns(self.mapping.columns, self.kind)
        except ValueError as error:
            raise ConfigError("\n".join(f"columns.{line}" for line in str(error).splitlines())) from None
        if self.mapping.drop_columns and not self.has_prompts:
            raise ConfigError(f"drop_columns is of prompts, whose rows rewards read: leave it out of {self.contract}")
        if self.eval_path and (not self.path or self.reader == POLICY):
            raise ConfigError("eval_path names the held-out rows of a dataset whose path names the others: name both")

    @property
    def kind(self) -> Kind:
        """Kind of its rows, as adapters name it."""
        kinds: dict[str, Kind] = {"demonstrations": "demonstrations", "preference_pairs": "preferences"}
        return kinds.get(self.contract, "prompts")

    @property
    def reader(self) -> str:
        """Adapter in use, that of ``columns`` if there are some."""
        return COLUMNS if self.mapping.columns else self.adapter

    @property
    def has_prompts(self) -> bool:
        """True if a policy can answer its rows. Code tasks are prompts that programs answer."""
        return self.contract in ("prompts", "code_tasks")

    @property
    def is_sampled(self) -> bool:
        """True if its rows may be sampled from a policy of the run."""
        return POLICY in (self.reader, self.fallback)

    @property
    def files(self) -> dict[str, str]:
        """Files that it names, by their keys."""
        named = {"path": self.path, "eval_path": self.eval_path}
        return {key: path for key, path in named.items() if path and not path.startswith(HUB)}

    @property
    def without_folders(self) -> DatasetConfig:
        """Return the config with files as bare names: cache keys cover their content, not their location."""
        return replace(self, path=_without_folder(self.path), eval_path=_without_folder(self.eval_path))


def too_few_held_out(config: DatasetConfig, count: int) -> str:
    """Return the error of held-out rows that measure nothing; "" if there are enough.

    ``count``: the rows that are held out.
    """
    if count >= min(_MEASURES, config.num_eval):
        return ""
    wanted = (
        "" if config.eval_path else "a tenth of the prompts is: name held-out rows by eval_path or a column split, "
    )
    return f"{count} rows are held out, and {config.num_eval:,} were asked for; {wanted}add rows, or lower num_eval"


def _without_folder(path: str) -> str:
    return path if path.startswith(HUB) else Path(path).name


def resolve_paths(
    document: Mapping[str, Any], folder: Path, *, source: object, is_shipped: bool = False
) -> dict[str, Any]:
    """Resolve a preset's relative paths, which start at ``folder``, to paths from the current folder.

    ``source`` of the model tells whether ``model.path`` is a file. ``~`` is the user's folder, and a URL stays. A
    pattern that matches one file becomes its path. A path that leads out of the current folder becomes absolute.
    ``is_shipped``: the preset is built-in, and only the files next to it are resolved.
    """
    found = copy.deepcopy(dict(document))
    model = ((("model",), ("path",)),) if source in FILE_SOURCES else ()
    for place, keys in _SHIPPED if is_shipped else (*_PATHS, *model):
        for table in _tables(found, *place):
            for key in keys:
                named = table.get(key)
                if isinstance(named, str):
                    table[key] = _resolved(named, folder)
                elif isinstance(named, list):
                    table[key] = [_resolved(each, folder) if isinstance(each, str) else each for each in named]
    return found


def _resolved(path: str, folder: Path) -> str:
    is_elsewhere = path.startswith(HUB) or "://" in path
    return path if not path or is_elsewhere else _from_here(folder / _expanded(path))


def _expanded(path: str) -> Path:
    with suppress(RuntimeError):  # no such user
        return Path(path).expanduser()
    return Path(path)


def _from_here(path: Path) -> str:
    whole, here = Path(os.path.normpath(path.absolute())), Path.cwd()
    if not whole.exists() and len(found := row_files(whole)) == 1:
        whole = found[0]
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def _tables(node: object, *place: str) -> Iterator[dict[str, Any]]:
    """Return the tables at a place of a document; ``*`` matches each key of a table and each item of a list."""
    if not place:
        if isinstance(node, dict):
            yield node
        return
    first, *rest = place
    children: list[object] = []
    if isinstance(node, dict):
        children = list(node.values()) if first == "*" else [node.get(first)]
    elif isinstance(node, list) and first == "*":
        children = node
    for child in children:
        yield from _tables(child, *rest)
