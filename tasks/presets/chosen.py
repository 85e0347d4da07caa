"""Rows of the tables of :mod:`rlcore.choices` that a stage uses, and imported packages that it does not use."""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.config import AgentConfig, EngineConfig, EpisodeConfig, RewardTerm, player_of, to_dict
from rlcore.rewards.base import VERIFIERS
from rlcore.tasks.presets.data import HUB, DatasetConfig
from rlcore.tasks.presets.graph import Graders
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.stages import curriculum_of, reward_models_of, sampling_of, terms_of
from rlcore.tasks.store.imports import Chosen
from rlcore.tasks.store.nested import flatten

_MATH = Graders(kinds=("math",))


def chosen_by(config: Sections, *, graders: Graders = _MATH) -> Chosen:
    """Return the rows that the sections of a stage choose.

    ``graders``: those of a dataset, which try its reference answers.
    """
    stage, evaluation = config.declared.get("stage"), config.declared.get("evaluation")
    sampling = sampling_of(stage) if stage else None
    terms: list[RewardTerm] = list(terms_of(stage).values()) if stage else []
    terms += [each.term for each in evaluation.verifiers] if evaluation else []
    kinds = {"function" if ":" in term.kind else term.kind for term in terms}
    kinds |= {"reward_model"} if stage and reward_models_of(stage) else set()
    episodes: EpisodeConfig = sampling.episodes if sampling else config.declared.get("episodes", EpisodeConfig())
    agent: AgentConfig | None = sampling.agent if sampling else config.declared.get("agent")
    engine: EngineConfig | None = sampling.engine if sampling else config.declared.get("engine")
    placement = config.declared.get("distributed")
    data = () if stage else _datasets(config)
    screens = {"none", *("tests" for each in data if each.contract == "code_tasks")}
    if data and graders.compare:
        kinds, screens = kinds | ({*graders.kinds} & {*VERIFIERS}), screens | {"references"}
    return {
        "rewards.kind": frozenset(kinds),
        "episodes": frozenset({player_of(episodes, agent)}),
        "episodes.tools": frozenset(episodes.tools),
        "engine.kind": frozenset({engine.kind} if engine else ()),
        "distributed.backend": frozenset({placement.backend if placement else "local"}),
        "data.screen": frozenset(screens),
        "draw": frozenset({"by_pass_rate"} if stage and curriculum_of(stage) else ()),
    }


def idle_packages(config: Sections) -> frozenset[str]:
    """Return the packages that the code of a stage imports but does not use with these sections."""
    stage, model = config.declared.get("stage"), config.declared.get("model")
    settings = flatten(to_dict(stage.settings)) if stage else {}
    adapts = any(value for key, value in settings.items() if f".{key}".endswith(".lora.rank"))
    eight_bits = any(value == "adamw_8bit" for key, value in settings.items() if f".{key}".endswith("optim.kind"))
    data = () if stage else _datasets(config)
    made = any("reasoning_gym" in (each.adapter, each.fallback) for each in data)
    made |= "procedural" in chosen_by(config)["rewards.kind"]  # sampled pairs are graded
    fetched = any(path.startswith(HUB) for each in data for path in (each.path, each.eval_path))
    used = {
        "peft": adapts,
        "bitsandbytes": eight_bits,
        "accelerate": model is None or model.source in ("gguf", "package"),
        "gguf": model is None or model.source in ("gguf", "package"),
        "reasoning_gym": not data or made,
        "datasets": not data or fetched,
    }
    return frozenset(name for name, is_used in used.items() if not is_used)


def _datasets(config: Sections) -> tuple[DatasetConfig, ...]:
    found = config.declared.get("data")
    return tuple(found.values()) if isinstance(found, Mapping) else ()
