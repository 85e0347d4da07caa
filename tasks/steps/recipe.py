"""Code that a preset's step can import but never runs. It is left out of the stage's key.

Every entry is a choice of the preset with the modules that only this choice runs. A module without an entry counts for
every preset. So a forgotten entry runs too many stages again, never too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlcore.config import EngineConfig, EpisodeConfig, UpdateConfig
from rlcore.config.stages import reward_models_of, rewards_of, sampling_of
from tasks.preset.sections import Sections

_REWARDS: Mapping[str, tuple[str, ...]] = {
    "code": ("rlcore.rewards.code_tests", "rlcore.sandbox"),
    "format": ("rlcore.rewards.regex_matcher",),
    "judge": ("rlcore.rewards.judge",),
    "language": ("rlcore.rewards.language",),
    "length": ("rlcore.rewards.length",),
    "procedural": ("rlcore.rewards.procedural", "rlcore.rewards.procedural_scorer"),
    "a function": ("rlcore.rewards.user_function",),
    "repetition": ("rlcore.rewards.repetition",),
    "reward_model": (
        "rlcore.rewards.reward_model",
        "rlcore.models.reward_ensemble",
        "rlcore.models.reward_scale",
    ),
}
_TOOLS: Mapping[str, tuple[str, ...]] = {
    "python": ("rlcore.tools", "rlcore.sandbox"),
    "search": ("rlcore.tools", "data_contracts.search_corpus"),
    "calculator": ("rlcore.tools",),
}
_SERVERS = (
    "rlcore.models.weight_names",
    "rlcore.sampling.vllm.client",
    "rlcore.sampling.vllm.guard",
    "rlcore.sampling.vllm.metrics",
    "rlcore.sampling.vllm.placement",
    "rlcore.sampling.vllm.process",
    "rlcore.sampling.vllm.requests",
    "rlcore.sampling.vllm.server",
    "rlcore.sampling.vllm.sync",
    "rlcore.sampling.vllm.transfer",
    "rlcore.sampling.vllm.weights",
    "rlcore.sampling.vllm.worker",
)
_ENGINES: Mapping[str, tuple[str, ...]] = {"vllm": _SERVERS, "vllm_inprocess": _SERVERS}
_ADAPTERS = ("rlcore.models.adapter_targets", "rlcore.models.low_rank")
_RANKS = (
    "rlcore.training.children",
    "rlcore.training.exported",
    "rlcore.training.group",
    "rlcore.training.rank",
    "rlcore.training.rank_pool",
    "rlcore.training.rank_process",
    "rlcore.training.sft_ranks",
    "rlcore.training.wire",
)
_CLUSTER = (
    "rlcore.cluster.host",
    "rlcore.cluster.ranks",
    "rlcore.cluster.ray_cluster",
    "rlcore.cluster.sampler_role",
    "rlcore.cluster.samplers",
    "rlcore.cluster.scorer_role",
    "rlcore.cluster.scorers",
)
# What brings a checkpoint in, and nothing after that.
_IMPORTS = ("rlcore.models.gguf", "rlcore.models.scratch", "rlcore.models.starting_tokenizer")


def unused_by_stage(config: Sections) -> frozenset[str]:
    """What a stage that samples and scores, online RL or rejection sampling, does not run."""
    sampling = sampling_of(config.stage)
    assert sampling is not None
    models = ["reward_model"] if reward_models_of(config.stage) else []
    verifiers = _verifiers(config) if "evaluation" in config.declared else []
    kinds = [*(term.kind for term in rewards_of(config.stage)), *models, *verifiers]
    unplaced = _unplaced(config) if "placement" in config.declared else frozenset((*_RANKS, *_CLUSTER))
    return _unused(kinds, sampling.episodes, sampling.engine) | _unused_adapters(config.stage.settings) | unplaced


def unused_by_sft(config: Sections) -> frozenset[str]:
    """What supervised fine-tuning does not run."""
    return _unplaced(config)


def _unplaced(config: Sections) -> frozenset[str]:
    """The code of processes that the placement does not have."""
    return frozenset({"local": (*_RANKS, *_CLUSTER), "processes": _CLUSTER}.get(config.placement.backend, ()))


def _unused_adapters(settings: object) -> frozenset[str]:
    """The code of adapters, where all weights of the policy learn."""
    update: UpdateConfig | None = getattr(settings, "update", None)
    return frozenset(_ADAPTERS) if update and not update.adapter.rank else frozenset()


def unused_by_evaluation(config: Sections) -> frozenset[str]:
    """What an evaluation does not run."""
    return _unused(_verifiers(config), config.episodes, config.engine)


def unused_by_pairs(config: Sections) -> frozenset[str]:
    """What the sampling of preference pairs does not run."""
    return _unused(_verifiers(config), EpisodeConfig(), config.engine)


def _verifiers(config: Sections) -> list[str]:
    return [each.kind for each in config.evaluation.verifiers]


def _unused(kinds: Iterable[str], episodes: EpisodeConfig, engine: EngineConfig | None) -> frozenset[str]:
    assert engine is not None  # a stage is given its sections with one
    named = ("a function" if ":" in kind else kind for kind in kinds)
    taken = {module for kind in named for module in _REWARDS.get(kind, ())}
    taken |= {module for tool in episodes.tools for module in _TOOLS[tool]}
    taken |= {*_ENGINES.get(engine.kind, ())}
    every = {module for table in (_REWARDS, _TOOLS, _ENGINES) for modules in table.values() for module in modules}
    return frozenset({*_IMPORTS, *every} - taken)
