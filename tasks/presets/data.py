"""Settings of data sets; and where the files lie that a preset names."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlcore.config.bounds import Fraction, PositiveInt, Scalar
from rlcore.config.data import FILE_SOURCES
from rlcore.errors import ConfigError
from rlcore.strict import INLINE

POLICY = "policy"  # the adapter of pairs that a policy samples
HUB = "hub:"
_FEWEST_WORDS = 8  # as rlcore.data_contracts.gate.overlap has it
# Where a preset's document names files, and the keys that do; first those that committed presets have beside them.
_SHIPPED = ((("stages", "*"), ("folder",)),)
_PATHS = (
    (("data", "*"), ("path", "eval_path")),
    (("model",), ("chat_template",)),
    (("stages", "*", "sampling", "episodes"), ("search_corpus",)),
    (("stages", "*", "rewards", "*", "options"), ("template",)),
    *_SHIPPED,
)


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """The comparison of a data set's texts, and the action on training rows that resemble an evaluation prompt.

    ``compare``: when two texts count as the same, for leaks and contradictions. ``loose``: what typing adds does not
    count (case, blanks, invisible characters, punctuation beside words, lookalikes); operators and numbers do.
    ``exact``: every character counts, as it may in code. ``near_duplicates``: what becomes of training prompts that are
    nearly a prompt which is evaluated on, by a word, or hold one in their history. ``exclude``: they are held out too,
    or quarantined where the source divides its rows. ``ignore``: they are not looked for.

    ``ngram_overlap``: what becomes of training rows that share ``ngram_size`` words in a row with a prompt that is
    evaluated on, in this data set or in another of the preset. ``warn``: the report counts such prompts.
    ``quarantine``: the rows are refused, each with the prompt. ``refuse``: the data set is.
    """

    compare: Literal["loose", "exact"] = "loose"
    near_duplicates: Literal["exclude", "ignore"] = "exclude"
    ngram_overlap: Literal["warn", "quarantine", "refuse"] = "warn"
    ngram_size: PositiveInt = 13  # at least 8; a shorter prompt of 8 words or more counts whole

    def __post_init__(self) -> None:
        if self.ngram_size < _FEWEST_WORDS:
            raise ConfigError(f"ngram_size must be at least {_FEWEST_WORDS}: fewer words are a phrase, and no leak")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One data set: where rows come from, how many are kept, and how strict its gate is.

    ``contract`` says what a row is. ``adapter`` names the function that turns the source into contract columns;
    ``path`` is a JSONL or Parquet file, or ``hub:org/name@revision``; empty for adapters that generate their rows or
    ``policy`` (pairs sampled from the checkpoint ``policy`` and graded). When ``path`` does not exist and ``fallback``
    is set, that adapter is used instead.

    Rows are divided into training and held-out rows by their prompts, unless each has a column ``split`` (``train`` or
    ``eval``), or ``eval_path`` names the source of the held-out ones: then all rows of ``path`` are for training.
    ``system_prompt``: the system prompt of conversations that have none; empty: the model's.
    """

    contract: Literal["prompts", "code_tasks", "demonstrations", "preference_pairs"]
    adapter: str
    path: str = ""
    eval_path: str = ""
    fallback: str = ""
    policy: str = ""
    num_train: PositiveInt
    num_eval: PositiveInt
    max_tokens: PositiveInt  # token budget of one row (prompt + completion)
    max_quarantined: Fraction = 0.01  # largest share of rows that may break the contract
    system_prompt: str = ""
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig, metadata=INLINE)
    options: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.eval_path and (not self.path or self.adapter == POLICY):
            raise ConfigError("eval_path names the held-out rows of a data set whose path names the others: name both")

    @property
    def has_prompts(self) -> bool:
        """True if a policy can answer its rows; tasks for code are prompts that programs answer."""
        return self.contract in ("prompts", "code_tasks")

    @property
    def is_sampled(self) -> bool:
        """True if its rows may be sampled from a policy of the run."""
        return POLICY in (self.adapter, self.fallback)

    @property
    def files(self) -> dict[str, str]:
        """The files that it names, by their keys."""
        named = {"path": self.path, "eval_path": self.eval_path}
        return {key: path for key, path in named.items() if path and not path.startswith(HUB)}

    @property
    def without_folders(self) -> DatasetConfig:
        """The same, files by their names alone: keys count their content, wherever they lie."""
        return replace(self, path=_without_folder(self.path), eval_path=_without_folder(self.eval_path))


def _without_folder(path: str) -> str:
    return path if path.startswith(HUB) else Path(path).name


def resolve_paths(
    document: Mapping[str, Any], folder: Path, *, source: object, is_shipped: bool = False
) -> dict[str, Any]:
    """A preset's document whose relative paths, which start at ``folder``, start at the current folder.

    ``source``: that of the model, which says whether ``model.path`` names a file. A path that leads out of the current
    folder becomes absolute. ``is_shipped``: the document is one of ours, of which only the files that come with it are
    meant so.
    """
    found = copy.deepcopy(dict(document))
    model = ((("model",), ("path",)),) if source in FILE_SOURCES else ()
    for place, keys in _SHIPPED if is_shipped else (*_PATHS, *model):
        for table in _tables(found, *place):
            for key in keys:
                if isinstance(table.get(key), str) and table[key] and not table[key].startswith(HUB):
                    table[key] = _from_here(folder / table[key])
    return found


def _from_here(path: Path) -> str:
    whole, here = Path(os.path.normpath(path.absolute())), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def _tables(node: object, *place: str) -> Iterator[dict[str, Any]]:
    """The tables at a place of a document; ``*`` stands for every key of a table and every item of a list."""
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
