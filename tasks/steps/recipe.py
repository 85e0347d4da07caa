"""Code that a preset's step can import but never runs. It is left out of the stage's key.

Every entry is a choice of the preset with the modules that only this choice runs, or with packages of others. What has
no entry counts for every preset. So a forgotten entry runs too many stages again, never too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlcore.config import EngineConfig, EpisodeConfig, UpdateConfig, to_dict
from rlcore.tasks.presets.data import HUB
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.stages import draw_of, reward_models_of, sampling_of, terms_of
from rlcore.tasks.store.nested import flatten

_REWARDS: Mapping[str, tuple[str, ...]] = {
    "code": ("rlcore.rewards.code_tests", "rlcore.sandbox"),
    "environment": ("rlcore.rewards.environment",),
    "format": ("rlcore.rewards.format", "rlcore.rewards.regex_matcher"),
    "judge": ("rlcore.rewards.judge", "rlcore.rewards.pair_endpoint"),
    "language": ("rlcore.rewards.language",),
    "length": ("rlcore.rewards.length",),
    "math": ("rlcore.rewards.math_verifier",),
    "procedural": ("rlcore.rewards.procedural", "rlcore.rewards.procedural_scorer"),
    "a function": ("rlcore.rewards.user_function",),
    "repetition": ("rlcore.rewards.repetition",),
    "reward_model": (
        "rlcore.rewards.reward_model",
        "rlcore.models.reward_ensemble",
        "rlcore.models.reward_scale",
    ),
}
_EPISODES = (
    "rlcore.environments.episodes",
    "rlcore.environments.episode_setup",
    "rlcore.environments.tool_output_template",
    "rlcore.environments",
)
_TOOLS: Mapping[str, tuple[str, ...]] = {
    "python": (*_EPISODES, "rlcore.sandbox"),
    "search": (*_EPISODES, "rlcore.data_contracts.contracts.search_corpus"),
    "calculator": _EPISODES,
}
_DRAWN = ("rlcore.sampling.difficulty", "rlcore.tasks.kinds.rl.drawn_prompts")
_SERVERS = ("rlcore.models.weight_names", "rlcore.sampling.replicas", "rlcore.sampling.vllm")
_ENGINES: Mapping[str, tuple[str, ...]] = {"vllm": _SERVERS, "vllm_inprocess": _SERVERS}
_ADAPTERS = ("rlcore.models.adapter_targets", "rlcore.models.low_rank")
_ADAPTED = "rlcore.models.lora"
_RECOMPUTED = "rlcore.models.gradient_checkpointing"
_RANKS = (
    "rlcore.distributed.local_ranks",
    "rlcore.distributed.exported",
    "rlcore.distributed.distributed_learner",
    "rlcore.distributed.rank",
    "rlcore.distributed.rank_pool",
    "rlcore.distributed.rank_process",
    "rlcore.distributed.distributed_supervised",
    "rlcore.distributed.serialization",
)
_CLUSTER = (
    "rlcore.distributed.cluster.connection",
    "rlcore.distributed.cluster.host",
    "rlcore.distributed.cluster.remote_ranks",
    "rlcore.distributed.cluster.ray_cluster",
    "rlcore.distributed.cluster.sampler_actor",
    "rlcore.distributed.cluster.samplers",
    "rlcore.distributed.cluster.scorer_actor",
    "rlcore.distributed.cluster.scorers",
)


_GGUF = ("accelerate", "gguf")


def unused_by_import(config: Sections) -> frozenset[str]:
    """Modules that the import of a starting checkpoint does not run."""
    return frozenset(() if config.model.source in ("gguf", "package") else _GGUF)


def unused_by_preparing(config: Sections, *, is_graded: bool) -> frozenset[str]:
    """What the preparation of a data set does not run. ``is_graded``: its references are tried by the math grader."""
    (data,) = config.data.values()
    graders = (
        _unused(["math"], EpisodeConfig(), EngineConfig())
        if is_graded
        else frozenset(("rlcore.tasks.steps.references",))
    )
    is_made = "reasoning_gym" in (data.adapter, data.fallback)
    is_fetched = any(path.startswith(HUB) for path in (data.path, data.eval_path))
    return graders | frozenset((*(() if is_made else ("reasoning_gym",)), *(() if is_fetched else ("datasets",))))


def unused_by_stage(config: Sections) -> frozenset[str]:
    """What a stage that samples and scores or compares, such as online RL or rejection sampling, does not run."""
    sampling = sampling_of(config.stage)
    assert sampling is not None
    models = ["reward_model"] if reward_models_of(config.stage) else []
    verifiers = _verifiers(config) if "evaluation" in config.declared else []
    kinds = [*(term.kind for term in terms_of(config.stage).values()), *models, *verifiers]
    unplaced = _unplaced(config) if "placement" in config.declared else frozenset((*_RANKS, *_CLUSTER))
    undrawn = frozenset(() if draw_of(config.stage) else _DRAWN)
    return _unused(kinds, sampling.episodes, sampling.engine) | _unused_by_learning(config) | unplaced | undrawn


def unused_by_training(config: Sections) -> frozenset[str]:
    """What supervised fine-tuning, DPO and the training of a reward model do not run."""
    return _unplaced(config) | _unlearned(config)


def _unplaced(config: Sections) -> frozenset[str]:
    """The code of processes that the placement does not have."""
    return frozenset({"local": (*_RANKS, *_CLUSTER), "processes": _CLUSTER}.get(config.placement.backend, ()))


def _unused_by_learning(config: Sections) -> frozenset[str]:
    """The code of adapters, where all weights of the policy learn; that of layers computed again, where none are."""
    update: UpdateConfig | None = getattr(config.stage.settings, "update", None)
    repeats = config.hardware.recompute_layers
    without_adapter = update is not None and not update.adapter.rank
    adapters = {*_ADAPTERS} if without_adapter else set()
    if without_adapter and not repeats:  # a layer that is computed again asks which adapter is on
        adapters.add(_ADAPTED)
    return frozenset(adapters if repeats else {*adapters, _RECOMPUTED}) | _unlearned(config)


def _unlearned(config: Sections) -> frozenset[str]:
    """The packages that adapters and optimizers of a training stage would need, where it has none of them."""
    settings = flatten(to_dict(config.stage.settings))
    adapts = any(value for key, value in settings.items() if f".{key}".endswith(".adapter.rank"))
    eight_bits = any(value == "adamw_8bit" for key, value in settings.items() if f".{key}".endswith("optim.kind"))
    return frozenset((*(() if adapts else ("peft",)), *(() if eight_bits else ("bitsandbytes",))))


def unused_by_evaluation(config: Sections) -> frozenset[str]:
    """What an evaluation does not run."""
    return _unused(_verifiers(config), config.episodes, config.engine) | {"peft"}


def unused_by_pairs(config: Sections) -> frozenset[str]:
    """What the sampling of preference pairs does not run."""
    return _unused(_verifiers(config), EpisodeConfig(), config.engine) | {"peft"}


def _verifiers(config: Sections) -> list[str]:
    return [each.kind for each in config.evaluation.verifiers]


def _unused(kinds: Iterable[str], episodes: EpisodeConfig, engine: EngineConfig | None) -> frozenset[str]:
    assert engine is not None  # a stage is given its sections with one
    named = ("a function" if ":" in kind else kind for kind in kinds)
    taken = {module for kind in named for module in _REWARDS.get(kind, ())}
    taken |= {module for tool in episodes.tools for module in _TOOLS[tool]}
    taken |= {*_EPISODES} if episodes.environment else set()
    taken |= {*_ENGINES.get(engine.kind, ())}
    every = {module for table in (_REWARDS, _TOOLS, _ENGINES) for modules in table.values() for module in modules}
    return frozenset(every - taken)
