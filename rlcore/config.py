"""Configuration: frozen dataclasses built strictly from a preset (TOML) and overrides; a wrong key is an error.

A field without a default is required. Bounds stand in the type (``Annotated[int, AtLeast(1)]``) and are checked by
:func:`build`, which names the path of every fault (``grpo.learning_rate``) before anything runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from rlcore.errors import ConfigError

T = TypeVar("T")
Scalar = str | int | float | bool


@dataclass(frozen=True)
class AtLeast:
    """Bound: value >= ``low``."""

    low: float

    def fault(self, value: float) -> str:
        return "" if value >= self.low else f"must be at least {self.low}"


@dataclass(frozen=True)
class Above:
    """Bound: value > ``low``."""

    low: float

    def fault(self, value: float) -> str:
        return "" if value > self.low else f"must be greater than {self.low}"


@dataclass(frozen=True)
class Between:
    """Bound: ``low`` <= value <= ``high``."""

    low: float
    high: float

    def fault(self, value: float) -> str:
        return "" if self.low <= value <= self.high else f"must be between {self.low} and {self.high}"


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0.0)]
NonNegativeFloat = Annotated[float, AtLeast(0.0)]
Fraction = Annotated[float, Between(0.0, 1.0)]


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Where and in which precision to compute. ``auto``: CUDA if present; bfloat16 only where the hardware has it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_threads: NonNegativeInt = 0  # 0: torch's default


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Shape of a Llama made from scratch."""

    hidden_size: PositiveInt = 192
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt = 6
    intermediate_size: PositiveInt = 512
    max_positions: PositiveInt = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The starting checkpoint.

    ``source``: ``scratch`` (a new Llama of ``shape``), ``hub`` (``path`` is ``org/name``, ``revision`` a 40-hex
    commit), ``folder`` (``path``), ``gguf`` (``path`` to the file), ``package`` (``path`` is an installed Python
    package that carries ``file``, a GGUF), ``registry`` (``path`` is an MLflow model URI).
    """

    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""
    revision: str = ""
    file: str = ""
    licence: str = ""
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One dataset: where rows come from, how many are kept, and how strict its gate is.

    ``adapter`` names the function that turns the source into contract columns; ``path`` is a JSONL or Parquet file,
    or ``hub:org/name@revision``; empty for adapters that generate their rows or ``policy`` (pairs sampled from the
    SFT policy and graded). When ``path`` does not exist and ``fallback`` is set, that adapter is used instead.
    """

    adapter: str
    path: str = ""
    fallback: str = ""
    num_train: PositiveInt
    num_eval: PositiveInt
    max_tokens: PositiveInt  # token budget of one row (prompt + completion)
    max_quarantined: Fraction = 0.01
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, then the named schedule."""

    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations; the loss is on the completion alone."""

    num_steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training. ``trainable_layers``: how many of the trunk's last layers learn (-1: all)."""

    num_epochs: PositiveInt
    batch_size: PositiveInt  # pairs per optimizer step
    learning_rate: PositiveFloat
    head_learning_rate: PositiveFloat
    trainable_layers: Annotated[int, AtLeast(-1)] = -1
    margin: NonNegativeFloat = 0.0
    tokens_per_microbatch: PositiveInt = 8192
    min_accuracy: Fraction = 0.0  # the stage fails below this held-out pair accuracy
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are drawn. No top-p, top-k or min-p: a filtered distribution biases the ratio."""

    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt
    max_concurrent: PositiveInt = 256  # sequences decoded together


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL to the reference policy. ``placement`` ``reward`` uses k1 per token; ``loss`` uses ``estimator``.

    ``target`` > 0 turns on the adaptive controller (``reward`` placement), with ``horizon`` in samples.
    """

    coefficient: NonNegativeFloat = 0.0
    placement: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1_ratio", "k2", "k3_ratio"] = "k3_ratio"
    target: NonNegativeFloat = 0.0
    horizon: PositiveInt = 10_000


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of PPO, a trunk of its own."""

    initialise_from: Literal["policy", "reward_model"] = "policy"
    learning_rate: PositiveFloat = 1e-5
    clip_range: NonNegativeFloat = 0.2  # 0: no value clipping
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    warmup_iterations: NonNegativeInt = 0  # iterations in which the critic alone learns


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """Correction of the difference between the engine's and the trainer's log-probabilities."""

    mode: Literal["truncate", "mask", "off"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 2.0


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One component of the reward: ``kind`` is a name of ``rlcore.rewards.REWARDS`` or ``module:function``."""

    kind: str
    weight: float = 1.0
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one batch of rollouts is turned into optimizer steps."""

    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 8192
    entropy_coefficient: NonNegativeFloat = 0.0
    max_kl: NonNegativeFloat = 0.0  # early stop of the epochs on the KL to the old policy; 0: never
    truncated: Literal["score", "mask", "zero"] = "score"  # what a completion cut by the limit is worth
    optim: OptimConfig = field(default_factory=OptimConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """One online-RL run. ``algorithm`` is a row of ``rlcore.algorithms.table.ALGORITHMS``."""

    algorithm: str
    num_iterations: PositiveInt
    prompts_per_iteration: PositiveInt
    group_size: PositiveInt
    learning_rate: PositiveFloat
    rewards: tuple[RewardTerm, ...]
    sampling: SamplingConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval_every: NonNegativeInt = 0
    checkpoint_every: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: greedy, and ``num_samples`` sampled completions for pass@k."""

    num_problems: PositiveInt
    max_new_tokens: PositiveInt
    verifier: Literal["math", "procedural"] = "math"  # what decides right or wrong, whatever the reward mixes in
    num_samples: NonNegativeInt = 0  # 0: greedy only
    num_sampled_problems: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    num_monitor_problems: PositiveInt = 64  # of the periodic evaluation inside an RL run
    confidence: Fraction = 0.95
    max_concurrent: PositiveInt = 256


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A preset: one run, whole."""

    name: str
    seed: NonNegativeInt
    model: ModelConfig
    prompts: DatasetConfig
    demonstrations: DatasetConfig
    preferences: DatasetConfig
    sft: SftConfig
    reward_model: RewardModelConfig
    grpo: RlConfig
    ppo: RlConfig
    evaluation: EvaluationConfig
    runs: tuple[Literal["grpo", "ppo"], ...] = ("grpo", "ppo")  # the RL runs that post-training does and compares
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


def load_preset(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML preset, apply overrides such as ``grpo.learning_rate=2e-6``, and check all of it.

    Raises:
        ConfigError: unreadable file, malformed TOML or override, unknown key, wrong type, value out of bounds.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the preset: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the preset is not valid TOML: {error}", where=str(path)) from error
    for override in overrides:
        _apply_override(document, override)
    return build(RunConfig, document, source=str(path))


def build(kind: type[T], document: Mapping[str, Any], *, source: str = "configuration") -> T:
    """Build a frozen dataclass from nested mappings, strictly.

    Raises:
        ConfigError: with every fault found, one per line, each with its path.
    """
    faults: list[str] = []
    value = _build(kind, document, "", faults)
    if faults:
        raise ConfigError(
            "the configuration is refused:\n    " + "\n    ".join(faults),
            where=source,
            fix="correct the named keys; nothing has been run",
        )
    return typing.cast(T, value)


def to_dict(value: Any) -> Any:
    """The JSON-able form of a configuration value, with keys in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form path.to.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: prompts.path=data/my.jsonl
    *parents, leaf = key.strip().split(".")
    node: Any = document
    for parent in parents:
        if isinstance(node, list):
            node = _list_item(node, parent, override)
            continue
        node = node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    if isinstance(node, list):
        raise ConfigError(f"override {override!r}: name an item of the list by its number, then its key")
    node[leaf] = value


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: {index!r} is not a number below {len(items)}")
    return items[int(index)]


def _build(kind: Any, value: Any, path: str, faults: list[str]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        built = _build(arguments[0], value, path, faults)
        message = next((m for bound in arguments[1:] if (m := _bound_fault(bound, built))), "")
        if message:
            faults.append(f"{path} = {value!r}: {message}")
        return built
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, path, faults)
    if origin is Literal:
        if value not in arguments:
            faults.append(f"{path} = {value!r}: must be one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            faults.append(f"{path} = {value!r}: must be a list")
            return ()
        return tuple(_build(arguments[0], item, f"{path}.{i}", faults) for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            faults.append(f"{path} = {value!r}: must be a table of names and values")
            return {}
        return {key: _build(arguments[1], item, f"{path}.{key}", faults) for key, item in value.items()}
    if isinstance(kind, types.UnionType):
        if not isinstance(value, kind):
            faults.append(f"{path} = {value!r}: must be a text, a number or a boolean")
        return value
    return _build_scalar(kind, value, path, faults)


def _build_dataclass(kind: type, value: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(value, Mapping):
        faults.append(f"{path or 'preset'} = {value!r}: must be a section")
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(fields)}"
            faults.append(f"{prefix}{key}: unknown key{hint}")
    built = {}
    before = len(faults)
    for name, described in fields.items():
        if name in value:
            built[name] = _build(hints[name], value[name], f"{prefix}{name}", faults)
        elif described.default is dataclasses.MISSING and described.default_factory is dataclasses.MISSING:
            faults.append(f"{prefix}{name}: required, but missing")
    return kind(**built) if len(faults) == before else None


def _build_scalar(kind: Any, value: Any, path: str, faults: list[str]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        faults.append(f"{path} = {value!r}: must be {_name(kind)}, not {_name(type(value))}")
    elif kind is float and value - value != 0:  # NaN and infinity
        faults.append(f"{path} = {value!r}: must be a finite number")
    return value


def _bound_fault(bound: Any, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return typing.cast(str, bound.fault(value)) if is_number else ""


def _name(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "a table"}.get(
        kind, kind.__name__
    )
