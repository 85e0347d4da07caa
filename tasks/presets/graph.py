"""The graph of a preset's stages: what each needs, which checkpoints there are, and what is wrong with it.

Everything here is a function of a preset that has been built; nothing is read or run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from rlcore.config.rl import RlConfig
from rlcore.tasks.kinds.facts import BASE, StageConfig
from rlcore.tasks.presets.stages import (
    curriculum_of,
    data_of,
    gold_pairs_of,
    human_pairs_of,
    named_start,
    reference_of,
    reward_models_of,
    rewards_of,
    rl_of,
)

if TYPE_CHECKING:
    from rlcore.tasks.presets.run import RunConfig

REGISTRY = "models:/"
"""What the URI of a registered model begins with, where a stage names one as its start."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = (
    *(BASE, "policy", "critic", "reference", "import_sft", "compare"),
    *("champion", "champion_win_rate", "drift", "reward_gate", "promote"),
)
_TAKEN_BEGINNINGS = ("prepare_", "evaluate_", "start_", "reference_", "asked_")


def is_name(name: str) -> bool:
    """Return True if a data set or a stage may have this name: it is part of names of stages, models and metrics."""
    return bool(_NAME.fullmatch(name)) and name not in _TAKEN and not name.startswith(_TAKEN_BEGINNINGS)


def start_of(stage: str, config: StageConfig) -> str:
    """The checkpoint that a stage starts from; one of the registry is called after the stage that starts from it."""
    return f"start_{stage}" if named_start(config).startswith(REGISTRY) else named_start(config)


def ref_policy_of(stage: str, config: StageConfig) -> str:
    """The reference of a stage, named as :func:`start_of` names a start; empty where that is the start itself."""
    named = reference_of(config)
    return f"reference_{stage}" if named.startswith(REGISTRY) else named


def registered_starts(config: RunConfig) -> dict[str, str]:
    """The checkpoints that come from the registry, with their URIs."""
    named = [
        pair
        for name, each in config.stages.items()
        for pair in ((start_of(name, each), named_start(each)), (ref_policy_of(name, each), reference_of(each)))
    ]
    return {name: uri for name, uri in named if uri.startswith(REGISTRY)}


def needed_stages(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """For each stage of the preset those that it needs, by name; data sets, the base and the registry left out."""
    found: dict[str, tuple[str, ...]] = {}
    for name, stage in config.stages.items():
        rows = (*data_of(stage), *gold_pairs_of(stage))
        policies = [config.data[each].policy for each in rows if each in config.data]
        named = [named_start(stage), reference_of(stage), *data_of(stage), *reward_models_of(stage), *policies]
        if draw := curriculum_of(stage):
            named.append(draw.pass_rates)
        found[name] = tuple(dict.fromkeys(each for each in named if each in config.stages))
    return found


def stage_order(config: RunConfig) -> tuple[str, ...]:
    """The preset's stages, each after those that it needs, otherwise as they stand in the preset.

    Raises:
        CycleError: stages need each other.
    """
    return tuple(TopologicalSorter(needed_stages(config)).static_order())


def checkpoints(config: RunConfig) -> dict[str, StageConfig | None]:
    """Every policy of a run in the order in which they are made, with its stage; None for what is imported."""
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
    """Return the pairs of checkpoints that are compared, the new one first: with its start, its teachers, and those of
    the same start, however they learned: was RL better than DPO?
    """
    made = checkpoints(config)
    pairs: list[tuple[str, str]] = []
    for name, stage in made.items():
        if stage is None:
            continue
        start = start_of(name, stage)
        teachers = [named_start(config.stages[each]) for each in data_of(stage) if each in config.stages]
        siblings = [other for other, its in made.items() if its is not None and start_of(other, its) == start]
        older = dict.fromkeys((start, ref_policy_of(name, stage), *teachers, *siblings[: siblings.index(name)]))
        pairs += [(name, each) for each in older if each in made]
    return tuple(pairs)


def same_start_runs(config: RunConfig) -> tuple[tuple[str, ...], ...]:
    """The RL stages that started from the same checkpoint, where there are several: compared at equal cost."""
    groups: dict[str, list[str]] = {}
    for name, stage in checkpoints(config).items():
        if stage is not None and rl_of(stage):
            groups.setdefault(start_of(name, stage), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def prompt_data(config: RunConfig) -> tuple[str, ...]:
    """The data sets of prompts."""
    return tuple(name for name, each in config.data.items() if each.has_prompts)


def evaluated_data(config: RunConfig) -> tuple[str, ...]:
    """The data sets whose held-out problems are asked in evaluations."""
    return config.evaluation.data or prompt_data(config)


def math_data(config: RunConfig) -> frozenset[str]:
    """The data sets by whose references ``math`` grades: in the reward of a stage, or as a verifier that names them."""
    terms = [(term, data_of(stage)) for stage in config.stages.values() for term in rewards_of(stage)]
    rewarded = {name for term, names in terms if term.kind == "math" for name in names if name in (term.data or names)}
    named = {name for verifier in config.evaluation.verifiers if verifier.kind == "math" for name in verifier.data}
    return frozenset((rewarded | named) & config.data.keys())


def rl_stages(config: RunConfig) -> dict[str, RlConfig]:
    """The settings of the stages of online RL, in their order."""
    return {name: rl for name in stage_order(config) if (rl := rl_of(config.stages[name]))}


def ancestors(config: RunConfig, name: str) -> frozenset[str]:
    """Every stage of the preset that the stage ``name`` needs, directly or not."""
    needed, found, waiting = needed_stages(config), set[str](), [name]
    while waiting:
        new = [each for each in needed[waiting.pop()] if each not in found]
        found |= set(new)
        waiting += new
    return frozenset(found)


def num_earlier_rl(config: RunConfig, name: str) -> int:
    """Count the RL stages that the stage ``name`` builds on; stages of one start have the same number."""
    return sum(each in rl_stages(config) for each in ancestors(config, name))


def required_by(config: RunConfig, targets: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The preset's stages and data sets that a run of ``targets`` needs; everything where a target needs all of them.

    ``targets`` are stages of the pipeline: ``grpo``, ``evaluate_grpo``, ``prepare_prompts``, ``compare``.
    """
    names = {target.removeprefix("evaluate_").removeprefix("prepare_") for target in targets}
    if not names <= {*config.stages, *config.data, *checkpoints(config), "import_sft"}:
        return tuple(config.stages), tuple(config.data)
    own = {each for name in names & config.stages.keys() for each in (name, *ancestors(config, name))}
    sampled = {config.data[name].policy for name in names & config.data.keys()} & config.stages.keys()
    own |= {each for name in sampled for each in (name, *ancestors(config, name))}
    is_evaluated = any(target.startswith("evaluate_") for target in targets) or own & rl_stages(config).keys()
    stages = [config.stages[name] for name in own]
    read = [each for stage in stages for each in (*data_of(stage), *gold_pairs_of(stage), *human_pairs_of(stage))]
    data = {*names, *read}
    data |= set(evaluated_data(config)) if is_evaluated else set()
    in_order = (name for name in config.stages if name in own)
    return tuple(in_order), tuple(name for name in config.data if name in data)


def cycle_in(needed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Stages that need each other, the first once more at the end; empty where there are none."""
    try:
        tuple(TopologicalSorter(needed).static_order())
    except CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()
