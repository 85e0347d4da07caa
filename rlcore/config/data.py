"""Settings of where models and data come from, and of the machine."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveInt, Scalar
from rlcore.errors import ConfigError

POLICY = "policy"  # the adapter of pairs that a policy samples
HUB = "hub:"
_FILE_SOURCES = ("folder", "gguf")
# Where a preset's document names files, and the keys that do.
_PATHS = (
    (("data", "*"), ("path", "eval_path")),
    (("model",), ("chat_template",)),
    (("stages", "*", "sampling", "episodes"), ("corpus",)),
    (("stages", "*", "rewards", "*", "options"), ("template",)),
)
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")  # what the pipeline gives a chat template
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Where and in which precision to compute; what ``auto`` becomes, :mod:`rlcore.machine` decides.

    ``device``: ``auto`` (CUDA if present), ``cpu``, ``cuda``, or one card by its number, ``cuda:1``. ``dtype``: of the
    matrix products; ``auto`` is float32 on a CPU and bfloat16 on CUDA (float16 on a card without bfloat16 units).
    ``recompute_layers``: gradient checkpointing. Activations inside a learning model's layers are not kept but computed
    again in the backward pass: less memory, about a third more time. ``save_float32``: write checkpoints of SFT and RL
    in float32, even if the starting checkpoint and the products are in half precision.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: NonNegativeInt = 0  # 0: torch's default
    recompute_layers: bool = False
    save_float32: bool = False

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device = {self.device!r} must be one of 'auto', 'cpu', 'cuda', 'cuda:0', 'cuda:1', …")


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Shape of a Llama made from scratch."""

    hidden_size: PositiveInt = 192
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt = 6
    intermediate_size: PositiveInt = 512
    max_positions: PositiveInt = 256

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError("hidden_size must be a multiple of 2 * num_heads (rotary positions pair dimensions)")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The starting checkpoint.

    ``source``: ``scratch`` (a new Llama of ``shape``), ``hub`` (``path`` is ``org/name``, ``revision`` a 40-hex
    commit), ``folder`` (``path``), ``gguf`` (``path`` to the file), ``package`` (``path`` is an installed Python
    package that carries ``file``, a GGUF), ``registry`` (``path`` is an MLflow model URI).

    ``template_arguments``: variables of the chat template, such as ``enable_thinking = false``. ``extra_eos``: control
    tokens that end a completion, in addition to those that the model declares: ``<|im_end|>``, for example, if a base
    model's template ends turns with it. Both become a part of the imported checkpoint, and of every model trained from
    it. ``system``: the system prompt of the data sets that name none.
    """

    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""
    revision: str = ""
    file: str = ""
    licence: str = ""
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    template_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    extra_eos: tuple[str, ...] = ()
    system: str = ""
    shape: ShapeConfig = field(default_factory=ShapeConfig)

    def __post_init__(self) -> None:
        if self.source != "scratch" and not self.path:
            raise ConfigError(f"path: required with source = {self.source!r}, but missing")
        for name in self.template_arguments:
            if not name.isidentifier() or name in _GIVEN:
                raise ConfigError(f"template_arguments.{name}: not a variable that a preset may set in a chat template")

    @property
    def files(self) -> dict[str, str]:
        """The files and folders that it names, by their keys."""
        named = {"path": self.path if self.source in _FILE_SOURCES else "", "chat_template": self.chat_template}
        return {key: path for key, path in named.items() if path}

    @property
    def without_folders(self) -> ModelConfig:
        """The same, files by their names alone: keys count their content, wherever they lie."""
        path = Path(self.path).name if self.source in _FILE_SOURCES else self.path
        return replace(self, path=path, chat_template=Path(self.chat_template).name)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One data set: where rows come from, how many are kept, and how strict its gate is.

    ``contract`` says what a row is. ``adapter`` names the function that turns the source into contract columns;
    ``path`` is a JSONL or Parquet file, or ``hub:org/name@revision``; empty for adapters that generate their rows or
    ``policy`` (pairs sampled from the checkpoint ``policy`` and graded). When ``path`` does not exist and ``fallback``
    is set, that adapter is used instead.

    Rows are divided into training and held-out rows by their prompts, unless each has a column ``split`` (``train`` or
    ``eval``), or ``eval_path`` names the source of the held-out ones: then all rows of ``path`` are for training.
    ``system``: the system prompt of conversations that have none; empty: the model's.

    ``compare``: when two texts count as the same, for leaks and contradictions. ``loose``: what typing adds does not
    count (case, blanks, invisible characters, punctuation beside words, lookalikes); operators and numbers do.
    ``exact``: every character counts, as it may in code. ``near_duplicates``: what becomes of training prompts that are
    nearly a prompt which is evaluated on, by a word, or hold one in their history. ``apart``: they are held out too,
    or quarantined where the source divides its rows. ``ignore``: they are not looked for.
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
    system: str = ""
    compare: Literal["loose", "exact"] = "loose"
    near_duplicates: Literal["apart", "ignore"] = "apart"
    options: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.eval_path and (not self.path or self.adapter == POLICY):
            raise ConfigError("eval_path names the held-out rows of a data set whose path names the others: name both")

    @property
    def has_prompts(self) -> bool:
        """Whether its rows are asked of a policy; tasks for code are prompts that programs answer."""
        return self.contract in ("prompts", "code_tasks")

    @property
    def is_sampled(self) -> bool:
        """Whether its rows may be sampled from a policy of the run."""
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


def anchored(document: Mapping[str, Any], folder: Path, *, source: object) -> dict[str, Any]:
    """A preset's document whose relative paths, which start at ``folder``, start at the current folder.

    ``source``: that of the model, which says whether ``model.path`` names a file. A path that leads out of the current
    folder becomes absolute.
    """
    found = copy.deepcopy(dict(document))
    model = ((("model",), ("path",)),) if source in _FILE_SOURCES else ()
    for place, keys in (*_PATHS, *model):
        for table in _tables(found, *place):
            for key in keys:
                if isinstance(table.get(key), str) and table[key] and not table[key].startswith(HUB):
                    table[key] = _from_here(folder / table[key])
    return found


def tried(path: str) -> str:
    """The path of a file that is not there, whole, and what relative paths are relative to."""
    return f"{Path(path).absolute()} (relative paths start at the preset's own file, those of --set at {Path.cwd()})"


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
