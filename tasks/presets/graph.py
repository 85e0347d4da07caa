"""Stages of a preset: the table of each kind, the names that a stage refers to, and their graph.

All functions depend only on a loaded preset; they read and run nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

from rlcore.config.answers import JudgeConfig
from rlcore.config.rl import CriticConfig, KlConfig, RewardTerm, RlConfig
from rlcore.config.sampling import SamplingConfig
from rlcore.errors import ConfigError, shown
from rlcore.rewards.base import VERIFIERS
from rlcore.strict_config import OneOf
from rlcore.tasks.kinds import BASE, KINDS, PRODUCTS, StageConfig, load
from rlcore.tasks.presets.data import POLICY

if TYPE_CHECKING:
    from rlcore.tasks.kinds.rl.kind import DrawConfig
    from rlcore.tasks.presets.run import RunConfig

FACTS = ("produces", "consumes", "data_key", "is_compared")


class _Tables(Mapping[str, type]):
    """The tables of all kinds by name, each imported when it is read: kinds import presets.

    It iterates over the pipeline's kinds, and finds ``module:NAME`` too.
    """

    def __getitem__(self, name: str) -> type:
        return _imported(name) if ":" in name else cast(type, load(KINDS[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def _imported(name: str) -> type:
    try:
        table, kind = load(name), load(name.partition(":")[0] + ":KIND")
        keys = set(get_type_hints(table)) if isinstance(table, type) else set()
    except (Exception, SystemExit) as error:  # a module may raise anything; a relative name is a TypeError
        raise ConfigError(
            f"cannot import the stage kind {name!r}: {shown(str(error))}",
            fix="name its table as module:NAME, of a module in the current folder or on PYTHONPATH that has KIND too",
        ) from error
    is_whole = {"kind", "settings"} <= keys and keys & {"init_from", "policy"}
    if not (is_whole and is_dataclass(table) and is_stage(table) and callable(getattr(kind, "stage", None))):
        fix = f"make it a dataclass with {', '.join(FACTS)}, kind, policy or init_from, settings; and KIND a StageKind"
        raise ConfigError(f"{name!r} is no table of a stage kind", fix=fix)
    produces, data_key = (getattr(table, fact) for fact in ("produces", "data_key"))
    if produces not in PRODUCTS or (data_key and data_key not in keys):
        fix = f"produces is one of {', '.join(PRODUCTS)}; data_key names a field, or is empty"
        raise ConfigError(f"produces or data_key of {name!r} is wrong", fix=fix)
    return cast(type, table)


def is_stage(section: object) -> bool:
    """Return True for the table of a stage."""
    return all(hasattr(section, fact) for fact in FACTS)


STAGE_KINDS: Mapping[str, type] = _Tables()
AnyStage = Annotated[Any, OneOf("kind", STAGE_KINDS)]
"""A :class:`StageConfig`, as :func:`rlcore.strict_config.build` chooses it by its kind."""


def data_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets, and stages that make some, whose rows a stage reads."""
    return tuple(getattr(stage, stage.data_key)) if stage.data_key else ()


def gold_pairs_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets that a stage is tested on but not trained on."""
    return cast(tuple[str, ...], getattr(stage, "gold_pairs", ()))


def shares_of(stage: StageConfig) -> Mapping[str, float]:
    """Return the mixture weight of each dataset; empty if a stage names a list."""
    named = getattr(stage, stage.data_key) if stage.data_key else {}
    return named if isinstance(named, Mapping) else {}


def sampling_of(stage: StageConfig) -> SamplingConfig | None:
    """Return the sampling settings of a stage."""
    return cast(SamplingConfig | None, getattr(stage.settings, "sampling", None))


def rewards_of(stage: StageConfig) -> tuple[RewardTerm, ...]:
    """Return the reward terms by which a stage scores completions."""
    return cast(tuple[RewardTerm, ...], getattr(stage.settings, "rewards", ()))


def judge_of(stage: StageConfig) -> JudgeConfig | None:
    """Return the judge that compares the answers of a stage."""
    return cast(JudgeConfig | None, getattr(stage.settings, "judge", None))


def terms_of(stage: StageConfig) -> dict[str, RewardTerm]:
    """Return the reward terms of a stage and its judge, by their keys within the stage."""
    found = {f"rewards.{place}": term for place, term in enumerate(rewards_of(stage))}
    judge = judge_of(stage)
    return found | {"judge": judge.term} if judge else found


def human_pairs_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets on which a stage's judge is audited."""
    return cast(tuple[str, ...], getattr(stage, "human_pairs", ()))


def reference_of(stage: StageConfig) -> str:
    """Return the checkpoint that a stage is compared with, if it is not its start; otherwise empty."""
    return cast(str, getattr(stage, reference_key(stage), ""))


def reference_key(stage: StageConfig) -> str:
    """Return the key that :func:`reference_of` reads; empty if a stage has none."""
    return next((key for key in ("ref_policy", "baseline") if hasattr(stage, key)), "")


def start_key(stage: StageConfig) -> str:
    """Return the key under which a stage names the checkpoint that it begins with."""
    return "init_from" if hasattr(stage, "init_from") else "policy"


def named_start(stage: StageConfig) -> str:
    """Return the checkpoint that a stage begins with, as its preset names it."""
    return cast(str, getattr(stage, start_key(stage)))


def curriculum_of(stage: StageConfig) -> DrawConfig | None:
    """Return the curriculum of a stage; None if all prompts are drawn equally often."""
    return cast("DrawConfig | None", getattr(stage, "curriculum", None))


def critic_of(stage: StageConfig) -> CriticConfig | None:
    """Return the critic's settings; None if a stage cannot have a critic."""
    return cast(CriticConfig | None, getattr(stage.settings, "critic", None))


def kl_of(stage: StageConfig) -> KlConfig | None:
    """Return the KL penalty of a stage, or None."""
    return cast(KlConfig | None, getattr(stage.settings, "kl", None))


def rl_of(stage: StageConfig | None) -> RlConfig | None:
    """Return the settings of an RL stage; None for others."""
    return stage.settings if stage is not None and hasattr(stage.settings, "algorithm") else None


def reward_models_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the stages whose reward models a stage needs: as rewards, as a judge, or to start a critic from."""
    named = [term.stage for term in terms_of(stage).values() if term.kind == "reward_model"]
    critic = critic_of(stage)
    if critic and critic.init_from != POLICY:
        named.append(critic.init_from)
    return tuple(dict.fromkeys(named))


FUNCTION = "function"  # kind of a custom reward
REGISTRY = "models:/"
"""Prefix of the URI of a registered model."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
_TAKEN = (
    *(BASE, "policy", "critic", "reference", "import_sft", "compare"),
    *("champion", "champion_win_rate", "drift", "reward_gate", "promote"),
)
_TAKEN_BEGINNINGS = ("prepare_", "evaluate_", "start_", "reference_", "asked_")


def is_name(name: str) -> bool:
    """Return True if a dataset or stage may have this name, which is part of names of stages, models and metrics."""
    return bool(_NAME.fullmatch(name)) and name not in _TAKEN and not name.startswith(_TAKEN_BEGINNINGS)


def start_of(stage: str, config: StageConfig) -> str:
    """Return the checkpoint that a stage starts from; a registered one is named after the stage that starts from it."""
    return f"start_{stage}" if named_start(config).startswith(REGISTRY) else named_start(config)


def ref_policy_of(stage: str, config: StageConfig) -> str:
    """Return the reference policy of a stage, named as in :func:`start_of`; empty if it is the start itself."""
    named = reference_of(config)
    return f"reference_{stage}" if named.startswith(REGISTRY) else named


def registered_starts(config: RunConfig) -> dict[str, str]:
    """Return the checkpoints that come from the registry, with their URIs."""
    named = [
        pair
        for name, each in config.stages.items()
        for pair in ((start_of(name, each), named_start(each)), (ref_policy_of(name, each), reference_of(each)))
    ]
    return {name: uri for name, uri in named if uri.startswith(REGISTRY)}


def needed_stages(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the stages that each stage needs, by name, without datasets, base and registry."""
    found: dict[str, tuple[str, ...]] = {}
    for name, stage in config.stages.items():
        rows = (*data_of(stage), *gold_pairs_of(stage))
        policies = [config.data[each].policy for each in rows if each in config.data]
        named = [named_start(stage), reference_of(stage), *data_of(stage), *reward_models_of(stage), *policies]
        if draw := curriculum_of(stage):
            named.append(draw.pass_rates)
        if rl_of(stage):
            named += config.evaluation.reward_models  # it is evaluated while it trains
        found[name] = tuple(dict.fromkeys(each for each in named if each in config.stages))
    return found


def stage_order(config: RunConfig) -> tuple[str, ...]:
    """Return the preset's stages, each after those that it needs, otherwise in the preset's order.

    Raises:
        CycleError: stages depend on each other.
    """
    return tuple(TopologicalSorter(needed_stages(config)).static_order())


def checkpoints(config: RunConfig) -> dict[str, StageConfig | None]:
    """Return the policies of a run in the order of their creation, with their stages; None for imported ones."""
    made: dict[str, StageConfig | None] = {BASE: None}
    for name in stage_order(config):
        stage = config.stages[name]
        for each in (start_of(name, stage), ref_policy_of(name, stage)):
            if each and each not in (*made, *config.stages):
                made[each] = None
        if stage.produces == "checkpoint":
            made[name] = stage
    return made


def contrasts(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Return pairs of checkpoints to compare, the new one first: with start, reference policy, sources, siblings.

    Sources are the policies that sampled its data. Siblings have the same start but another algorithm: was RL better
    than DPO?
    """
    made = checkpoints(config)
    pairs: list[tuple[str, str]] = []
    for name, stage in made.items():
        if stage is None:
            continue
        start = start_of(name, stage)
        data_policies = [named_start(config.stages[each]) for each in data_of(stage) if each in config.stages]
        siblings = [other for other, its in made.items() if its is not None and start_of(other, its) == start]
        older = dict.fromkeys((start, ref_policy_of(name, stage), *data_policies, *siblings[: siblings.index(name)]))
        pairs += [(name, each) for each in older if each in made]
    return tuple(pairs)


def same_start_runs(config: RunConfig) -> tuple[tuple[str, ...], ...]:
    """Return groups of RL stages with one starting checkpoint, which are compared at equal cost."""
    groups: dict[str, list[str]] = {}
    for name, stage in checkpoints(config).items():
        if stage is not None and rl_of(stage):
            groups.setdefault(start_of(name, stage), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def prompt_data(config: RunConfig) -> tuple[str, ...]:
    """Return the datasets of prompts."""
    return tuple(name for name, each in config.data.items() if each.has_prompts)


def evaluated_data(config: RunConfig) -> tuple[str, ...]:
    """Return the datasets whose held-out problems are evaluated."""
    return config.evaluation.data or prompt_data(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graders:
    """Graders of a dataset's answers: kinds of rewards and of verifiers named for it, ``function`` for a custom one.

    ``are_rewards``: one that compares with reference answers is a reward, which has to score each answer.
    """

    kinds: tuple[str, ...] = ()
    are_rewards: bool = False

    @property
    def compare(self) -> bool:
        """True if one of them compares answers with reference answers."""
        return any(kind in VERIFIERS for kind in self.kinds)


NO_GRADERS = Graders()


def graders_of(config: RunConfig, name: str) -> Graders:
    """Return the graders of a dataset's answers."""
    terms = [term for stage in config.stages.values() if name in data_of(stage) for term in rewards_of(stage)]
    rewards = {term.kind for term in terms if name in (term.data or (name,))}
    named = {verifier.kind for verifier in config.evaluation.verifiers if name in verifier.data}
    kinds = {FUNCTION if ":" in kind else kind for kind in rewards | named}
    return Graders(kinds=tuple(sorted(kinds)), are_rewards=any(kind in VERIFIERS for kind in rewards))


def rl_stages(config: RunConfig) -> dict[str, RlConfig]:
    """Return the settings of the stages of online RL, in their order."""
    return {name: rl for name in stage_order(config) if (rl := rl_of(config.stages[name]))}


def ancestors(config: RunConfig, name: str) -> frozenset[str]:
    """Return all stages that the stage ``name`` needs, directly or indirectly."""
    needed, found, waiting = needed_stages(config), set[str](), [name]
    while waiting:
        new = [each for each in needed[waiting.pop()] if each not in found]
        found |= set(new)
        waiting += new
    return frozenset(found)


def num_earlier_rl(config: RunConfig, name: str) -> int:
    """Count the RL stages that the stage ``name`` builds on."""
    return sum(each in rl_stages(config) for each in ancestors(config, name))


def required_by(config: RunConfig, targets: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the preset's stages and datasets that ``targets`` need; everything if a target needs all of them.

    ``targets`` are stages of the pipeline: ``grpo``, ``evaluate_grpo``, ``prepare_prompts``, ``compare``.
    """
    names = {target.removeprefix("evaluate_").removeprefix("prepare_") for target in targets}
    if not names <= {*config.stages, *config.data, *checkpoints(config), "import_sft"}:
        return tuple(config.stages), tuple(config.data)
    sampled = {config.data[name].policy for name in names & config.data.keys()}
    asked = (names | sampled) & config.stages.keys()
    own = {each for name in asked for each in (name, *ancestors(config, name))}
    is_evaluated = any(target.startswith("evaluate_") for target in targets) or own & rl_stages(config).keys()
    graders = config.evaluation.reward_models if is_evaluated else ()
    own |= {each for name in graders for each in (name, *ancestors(config, name))}
    stages = [config.stages[name] for name in own]
    read = [each for stage in stages for each in (*data_of(stage), *gold_pairs_of(stage), *human_pairs_of(stage))]
    data = {*names, *read}
    data |= set(evaluated_data(config)) if is_evaluated else set()
    in_order = (name for name in config.stages if name in own)
    return tuple(in_order), tuple(name for name in config.data if name in data)


def cycle_in(needed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return stages that depend on each other, the first one repeated at the end; empty if there are none."""
    try:
        tuple(TopologicalSorter(needed).static_order())
    except CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()
