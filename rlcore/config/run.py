"""A preset: one run, whole; read from TOML and overrides, and checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.data import DatasetConfig, HardwareConfig, ModelConfig
from rlcore.config.engine import EngineConfig
from rlcore.config.health import HealthConfig
from rlcore.config.promotion import PromotionConfig
from rlcore.config.rejection import RejectionConfig
from rlcore.config.report import ReportConfig
from rlcore.config.retrain import RetrainConfig
from rlcore.config.rl import RlConfig, SamplingConfig
from rlcore.config.training import RewardModelConfig, SftConfig
from rlcore.errors import ConfigError
from rlcore.strict import apply_override, build

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: greedy, and ``num_samples`` sampled completions for pass@k."""

    num_problems: PositiveInt
    max_new_tokens: PositiveInt
    verifier: Literal["math", "procedural", "code"] = (
        "math"  # what decides right or wrong, whatever the reward mixes in
    )
    verifier_options: Mapping[str, Scalar] = field(default_factory=dict)
    num_samples: NonNegativeInt = 0  # 0: greedy only
    num_sampled_problems: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    num_monitor_problems: PositiveInt = 64  # of the periodic evaluation inside an RL run
    confidence: Fraction = 0.95
    max_concurrent: PositiveInt = 256
    engine: EngineConfig | None = None  # left out: the run's


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A preset: one run, whole.

    ``engine`` samples everything that is sampled: rollouts, evaluations, rejection sampling's answers, pairs of the
    policy's own answers. A section may name another for itself.

    ``preferences`` and ``reward_model`` are absent together, where verifiers alone reward. ``grpo`` and ``ppo`` are
    needed as far as ``runs`` names them. ``rejection``, ``sft_kept`` and ``grpo_mixed`` may be absent; they are the
    second half of multi-stage reasoning, in its order: rejection sampling from the GRPO policy, SFT on what was kept,
    RL with mixed rewards from there.
    """

    name: str
    seed: NonNegativeInt
    model: ModelConfig
    prompts: DatasetConfig
    demonstrations: DatasetConfig
    sft: SftConfig
    evaluation: EvaluationConfig
    grpo: RlConfig | None = None
    ppo: RlConfig | None = None
    runs: tuple[Literal["grpo", "ppo"], ...] = ("grpo", "ppo")  # the RL runs that post-training does and compares
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    preferences: DatasetConfig | None = None
    reward_model: RewardModelConfig | None = None
    rejection: RejectionConfig | None = None
    sft_kept: SftConfig | None = None
    grpo_mixed: RlConfig | None = None
    promotion: PromotionConfig | None = None
    retrain: RetrainConfig | None = None

    def __post_init__(self) -> None:
        if (self.preferences is None) != (self.reward_model is None):
            raise ConfigError("[preferences] and [reward_model] are needed together, or neither")
        for name in self.runs:
            if getattr(self, name) is None:
                raise ConfigError(f"runs names {name!r}, so the section [{name}] is needed, or runs without it")
        if self.rejection and "grpo" not in self.runs:
            raise ConfigError("[rejection] samples from the GRPO policy, so runs must have 'grpo'")
        if self.sft_kept and not self.rejection:
            raise ConfigError("[sft_kept] trains on what rejection sampling keeps, so it needs a section [rejection]")
        if self.grpo_mixed and not self.sft_kept:
            raise ConfigError("[grpo_mixed] starts from [sft_kept], so it needs that section")
        if self.reward_model and not self.reward_model.trunk.adapter.rank:
            self._refuse_adapter_of_no_adapter()
        if self.sft.start == "policy":
            raise ConfigError("sft.start = 'policy': the first SFT starts from the base, there is no policy yet")
        self._refuse_turns_at_the_same_time()
        if self.retrain and (self.promotion is None or self.promotion.challenger not in self.runs):
            raise ConfigError(f"[retrain] needs [promotion] with a challenger among runs = {list(self.runs)}")

    def engine_of(self, section: SamplingConfig | EvaluationConfig) -> EngineConfig:
        """The engine that a section names, or the run's."""
        return section.engine or self.engine

    def section(self, name: str, kind: type[Section]) -> Section:
        """A section that a preset may lack, where it is needed: ``config.section("grpo", RlConfig)``.

        Raises:
            ConfigError: the preset has none.
        """
        found = getattr(self, name)
        if not isinstance(found, kind):
            raise ConfigError(
                f"the preset has no section [{name}]",
                where=f"preset {self.name}",
                fix=f"add [{name}]; presets that have it are in flows/presets",
            )
        return found

    def _refuse_turns_at_the_same_time(self) -> None:
        for rl in filter(None, (self.grpo, self.ppo, self.grpo_mixed)):
            if rl.sampling.staleness and self.engine_of(rl.sampling).kind == "vllm_inprocess":
                raise ConfigError(
                    "sampling.staleness = 1 samples while the update runs; vllm_inprocess and the update take turns: "
                    "take engine.kind = 'vllm'"
                )

    def _refuse_adapter_of_no_adapter(self) -> None:
        for name, rl in (("grpo", self.grpo), ("ppo", self.ppo)):
            if rl and (rl.critic.placement, rl.critic.initialise_from) == ("adapter", "reward_model"):
                raise ConfigError(
                    f"{name}.critic is an adapter that starts from the reward model's: set "
                    "reward_model.trunk.adapter.rank > 0, so that there is one"
                )


def load_preset(path: Path, overrides: Sequence[str] = (), *, library: Path | None = None) -> RunConfig:
    """Read a TOML preset, apply overrides such as ``grpo.learning_rate=2e-6``, and check all of it.

    A preset with ``extends = "other"`` holds only what differs from ``other.toml``, which lies in the same folder or in
    the folder ``library``: tables are merged key by key, everything else (lists too) is replaced. ``without`` lists
    sections of the other that this one does not have.

    Raises:
        ConfigError: unreadable file, malformed TOML or override, unknown key, wrong type, value out of bounds.
    """
    document = _read_with_bases(path, library or path.parent, ())
    for override in overrides:
        apply_override(document, override)
    return build(RunConfig, document, source=str(path))


def _read_with_bases(path: Path, library: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        raise ConfigError("presets extend each other in a circle", where=" -> ".join(map(str, (*above, path))))
    document = _read_toml(path)
    base = document.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str) or Path(base).name != base:
        raise ConfigError(
            f"extends = {base!r} is not the name of a preset",
            where=str(path),
            fix="name a committed preset, or one of the same folder, without .toml",
        )
    beside = path.with_name(f"{base}.toml")
    base_path = beside if beside.is_file() else library / beside.name
    inherited = _read_with_bases(base_path, library, (*above, path))
    for section in document.pop("without", []):
        if section not in inherited:
            raise ConfigError(f"without names {section!r}, which {base!r} does not have", where=str(path))
        del inherited[section]
    return _merge(inherited, document)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the preset: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the preset is not valid TOML: {error}", where=str(path)) from error


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both_tables = {
        key: _merge(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **both_tables}
