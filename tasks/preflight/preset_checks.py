"""Checks of a preset that need nothing but the preset and the files that it names; warnings about unusual values."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.config import EngineConfig, EpisodeConfig, RewardTerm, RlConfig, SamplingConfig
from rlcore.errors import ConfigError, RlcoreError
from rlcore.rewards.pair_judge import make_pair_judge
from rlcore.rewards.table import placeholder_model, reward_errors
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds import BASE, StageConfig
from rlcore.tasks.kinds.kind import kind_of
from rlcore.tasks.kinds.win_rate.kind import DISJOINT, WinRateStage, shared_pairs
from rlcore.tasks.preflight.model_checks import ModelFacts
from rlcore.tasks.presets.data import HUB, POLICY
from rlcore.tasks.presets.graph import (
    REGISTRY,
    data_of,
    evaluated_data,
    gold_pairs_of,
    human_pairs_of,
    judge_of,
    named_start,
    reference_key,
    reference_of,
    rewards_of,
    sampling_of,
    start_key,
    terms_of,
)
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.presets.settings import EvaluationConfig, TrackingConfig
from rlcore.tasks.steps.algorithm_facts import algorithm_facts
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.data_source import (
    check_options,
    has_files,
    hub_parts,
    ignored_path,
    is_generated,
    resolve_adapter,
    rows_sha256,
)
from rlcore.tasks.steps.external import agent_errors, environment_errors
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.toml_files import kind_of_machine, prices_path, read_prices
from rlcore.tasks.tracking.registry import read_version

_SANDBOX = "as root: apt-get install bubblewrap (Fedora: dnf install bubblewrap)"
# The largest values of published and shipped recipes, with a margin.
TYPICAL_MAXIMUM = {
    "learning_rate": 0.1,
    "head_learning_rate": 1.0,
    "critic.learning_rate": 0.1,
    "group_size": 1024,
    "num_samples": 1024,
    "sampling.temperature": 2.0,
    "kl.coefficient": 10.0,
    "update.num_epochs": 64,
}
PRETRAINED_MAXIMUM = {"all weights": 1e-4, "LoRA": 1e-3}
"""Largest learning rates of recipes that start from a pretrained model. Made-up models bear more."""
_LORA_RANKS = ("update.lora.rank", "lora.rank", "backbone.lora.rank")


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """Facts of a run before it starts: its preset, state directory, existing artifacts of its stages, and its base."""

    config: RunConfig
    home: Home
    refs: Mapping[str, ArtifactRef] = field(default_factory=dict)
    model: ModelFacts = field(default_factory=ModelFacts)


def _engine_of(config: RunConfig, path: str, section: SamplingConfig | EvaluationConfig) -> Iterator[str]:
    return _engine(f"{path}.engine" if section.engine else "engine", config.engine_of(section))


def _engine(path: str, engine: EngineConfig) -> Iterator[str]:
    if engine.kind == "native" or engine.urls:
        return
    if engine.python and shutil.which(engine.python) is None:
        yield f"{path}.python = {engine.python!r}: no such program; name the interpreter that has vLLM"
    elif not engine.python and find_spec("vllm") is None:
        yield f"{path}.kind = {engine.kind!r}: vLLM is not installed here; install it, or take engine.kind = 'native'"


def stage_errors(context: PreflightContext, name: str) -> Iterator[str]:
    """Yield the errors of a stage: start, algorithm, rewards, judge, files, sandbox, episodes, engine."""
    path, stage = f"stages.{name}", context.config.stages[name]
    yield from _start(context, name)
    yield from kind_of(stage.kind).checks(path, stage)
    sampling = sampling_of(stage)
    if sampling:
        yield from reward_errors(rewards_of(stage), f"{path}.rewards", prefill=context.model.prefill)
        if judge := judge_of(stage):
            known = {judge.stage: placeholder_model} if judge.stage else {}
            at = f"{path}.judge"
            yield from collect_error(at, lambda: make_pair_judge(judge, where=at, score_tokens=known))
        yield from _files(path, stage)
        yield from _sandbox(f"{path}.rewards", rewards_of(stage))
        yield from _episodes(f"{path}.sampling.episodes", sampling.episodes)
        yield from environment_errors(sampling.episodes, f"{path}.sampling.episodes")
        yield from agent_errors(sampling.agent, f"{path}.sampling.agent") if sampling.agent else ()
        yield from _engine_of(context.config, f"{path}.sampling", sampling)


def _episodes(path: str, episodes: EpisodeConfig) -> Iterator[str]:
    if episodes.search_corpus and not Path(episodes.search_corpus).is_file():
        yield f"{path}.search_corpus = {episodes.search_corpus!r}: no such file"
    if "python" in episodes.tools and shutil.which("bwrap") is None:
        yield f"{path}.tools: 'python' runs in a sandbox, and bubblewrap is not installed; {_SANDBOX}"


def _sandbox(path: str, terms: Sequence[RewardTerm]) -> Iterator[str]:
    for place, term in enumerate(terms):
        is_walled = term.kind == "code" and term.options.get("backend", "bubblewrap") == "bubblewrap"
        if is_walled and shutil.which("bwrap") is None:
            yield f"{path}.{place}: programs run in a sandbox, and bubblewrap is not installed; {_SANDBOX}"


def _files(path: str, stage: StageConfig) -> Iterator[str]:
    for key, term in terms_of(stage).items():
        for number, file in enumerate(term.files):
            if not Path(file).is_file():
                yield f"{path}.{key}.files.{number} = {file!r}: no such file"


def data_errors(config: RunConfig, name: str) -> list[str]:
    """Return the errors of a dataset: adapter, options, files that are not there."""
    data, path = config.data[name], f"data.{name}"
    errors = collect_error(f"{path}.adapter", lambda: resolve_adapter(data))
    errors = errors or collect_error(f"{path}.options", lambda: check_options(data))
    if errors:
        return errors
    adapter = resolve_adapter(data)
    if adapter == POLICY:
        return list(_engine("engine", config.engine))
    if is_generated(adapter):
        ignored = ignored_path(data)
        return [f"{path}.{ignored}"] if ignored else []
    found = _source(f"{path}.path", data.path, adapter, "set fallback")
    if data.eval_path:
        found += _source(f"{path}.eval_path", data.eval_path, adapter, "leave it out, to hold out rows of path")
        if not found and _are_equal(data.path, data.eval_path):
            found.append(f"{path}.eval_path = {data.eval_path!r}: has the rows of path; leave it out, to hold out some")
    return found


def _are_equal(one: str, other: str) -> bool:
    if one == other or HUB in (one[: len(HUB)], other[: len(HUB)]):
        return one == other
    return rows_sha256(one) == rows_sha256(other)


def _source(key: str, source: str, adapter: str, otherwise: str) -> list[str]:
    if source.startswith(HUB):
        return collect_error(key, lambda: hub_parts(source))
    if has_files(source):
        return collect_error(key, lambda: rows_sha256(source))
    if has_magic(source):
        return [f"{key} = {source!r}: this pattern matches no file"]
    return [f"{key} = {source!r}: no such file; correct the path of the adapter {adapter!r}, or {otherwise}"]


def evaluation_errors(config: RunConfig) -> Iterator[str]:
    """Yield the errors of the evaluation: verifiers, sandbox, engine."""
    terms = tuple(verifier.term for verifier in config.evaluation.verifiers)
    for error in reward_errors(terms, "evaluation.verifiers"):
        if "named twice" not in error:  # the graph has checked which of them decide on a dataset
            yield error
    yield from _sandbox("evaluation.verifiers", terms)
    yield from _engine_of(config, "evaluation", config.evaluation)


def _start(context: PreflightContext, name: str) -> Iterator[str]:
    stage: StageConfig = context.config.stages[name]
    named = (
        (start_key(stage), named_start(stage)),
        (reference_key(stage), reference_of(stage)),
    )
    for setting, uri in named:
        if uri.startswith(REGISTRY):
            yield from _registered(context, f"stages.{name}.{setting} = {uri!r}", uri)


def _registered(context: PreflightContext, key: str, uri: str) -> Iterator[str]:
    try:
        tags = read_version(context.home, uri.removeprefix(REGISTRY))
    except RlcoreError as error:
        yield f"{key}: {error.what}; train and register it first, or name one of {BASE} and the preset's stages"
        return
    folders = list(
        context.home.artifacts.glob(f"*/{tags.get('sha256') or '-'}/{MODEL}")
    )  # None if another state directory made it
    if not folders or not context.model.files:
        return
    from rlcore.text.tokenization import ChatTokenizer  # brings transformers

    if not ChatTokenizer.load(folders[0]).is_same_as(context.model.files.tokenizer()):
        yield (
            f"{key}: this model has another tokenizer than the run's; take a model of the same family, or make "
            "it the base: model.source = 'registry'"
        )


def tool_errors(tracking: TrackingConfig) -> Iterator[str]:
    """Yield a line for each tool that is not installed."""
    for name in tracking.also:
        if find_spec(name) is None:
            yield f"tracking.also: {name} is not installed: pip install {name}"


def budget_errors(config: RunConfig, home: Home) -> Iterator[str]:
    """Yield a line for each limit that could never be reached, because the amount is not known."""
    if config.budget.cost is not None:
        yield from collect_error("budget.cost", partial(_require_price, config, home))
    if config.budget.judge_cost is None:
        return
    for name, stage in config.stages.items():
        for key, term in terms_of(stage).items():
            is_pair_judge = term.kind == "judge" and key == "judge"
            if is_pair_judge and not (term.options.get("prompt_price") or term.options.get("completion_price")):
                yield f"budget.judge_cost: set stages.{name}.judge.options.prompt_price and completion_price"


def uncounted(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the preset has judges whose cost is not known."""
    terms = [term for stage in config.stages.values() for key, term in terms_of(stage).items() if key != "judge"]
    kinds = {*(each.kind for each in terms), *(each.kind for each in config.evaluation.verifiers)}
    if config.budget.judge_cost is not None and "judge" in kinds:
        yield "warning: budget.judge_cost counts judges of win rates alone; those that rate answers report no tokens"


def above_budget(config: RunConfig, home: Home, seconds: float) -> Iterator[str]:
    """Yield a warning for each limit below what the estimated seconds of a run will spend."""
    hours = seconds / 3600.0
    price = read_prices(home).of(known_machine(config.hardware).facts) or 0.0
    for key, estimate in {"hours": hours, "cost": hours * price}.items():
        limit = getattr(config.budget, key)
        if limit is not None and estimate > limit:
            shown = f"{limit:g} is below the estimate of {estimate:.2g}"
            yield f"warning: budget.{key} = {shown}: the run will stop, and resumes with a higher limit"


def _require_price(config: RunConfig, home: Home) -> None:
    machine = known_machine(config.hardware).facts
    if read_prices(home).of(machine) is None:
        what = f"{prices_path(home)} has no price of {kind_of_machine(machine)!r}"
        raise ConfigError(what, fix="write it there; infra/prices.toml is an example")


def unusual_values(config: RunConfig, stages: Collection[str]) -> list[str]:
    """Return a sentence for each value of these stages that exceeds the values of all recipes, or the data."""
    found = []
    for name in stages:
        stage, path = config.stages[name], f"stages.{name}"
        for key, largest in TYPICAL_MAXIMUM.items():
            value = _value(stage.settings, key)
            if value is not None and value > largest:
                found.append(f"warning: {path}.{key} = {value!r}: recipes have at most {largest!r}; is this intended?")
        if config.model.source != "scratch":
            found += _pretrained_rate(path, stage)
        found += [*_beyond_the_data(config, path, stage), *_late_warmup(config, path, stage), *_scaled_kl(path, stage)]
        if isinstance(stage, WinRateStage):
            found += [
                f"warning: {path}.judge: {reason}; its win rate is not trusted, and promotes nothing; {DISJOINT}"
                for reason in shared_pairs(config, stage)
            ]
    return found


def _pretrained_rate(path: str, stage: StageConfig) -> Iterator[str]:
    """Warn about a learning rate that is usual for small models from scratch, and wrecks a pretrained one."""
    trained = "LoRA" if any(_value(stage.settings, rank) for rank in _LORA_RANKS) else "all weights"
    value, largest = _value(stage.settings, "learning_rate"), PRETRAINED_MAXIMUM[trained]
    if value is not None and largest < value <= TYPICAL_MAXIMUM["learning_rate"]:
        yield (
            f"warning: {path}.learning_rate = {value!r}: recipes that train {trained} of a pretrained model have at "
            f"most {largest!r}; is this intended?"
        )


def _scaled_kl(path: str, stage: StageConfig) -> Iterator[str]:
    """Warn about a KL in rewards divided by the group's std: with equal scores, the KL alone is scaled to 1."""
    rl = stage.settings
    if not isinstance(rl, RlConfig) or rl.kl.apply_to == "loss" or rl.kl.coefficient == 0.0:
        return
    if algorithm_facts(rl).scale in ("group", "group_sample"):
        yield (
            f"warning: {path}.kl.apply_to = 'reward': {rl.algorithm} divides by the group's standard deviation, so a "
            "group of equal scores is trained on its KL alone, scaled up; is 'loss' intended?"
        )


def _most_rows(config: RunConfig, stage: StageConfig) -> float:
    """Return the largest number of a stage's training rows; infinite if another stage makes some."""
    return sum(config.data[name].num_train if name in config.data else math.inf for name in data_of(stage))


def unread_data(config: RunConfig) -> list[str]:
    """Return a sentence for each dataset that a run prepares for nothing."""
    stages = config.stages.values()
    read = {name for each in stages for name in (*data_of(each), *gold_pairs_of(each), *human_pairs_of(each))}
    unread = [name for name in config.data if name not in read.union(evaluated_data(config))]
    return [f"warning: data.{name}: no stage reads it; leave it out: without = ['data.{name}']" for name in unread]


def _value(settings: Any, key: str) -> float | None:
    for part in key.split("."):
        settings = getattr(settings, part, None)
    return settings if isinstance(settings, int | float) else None


def _beyond_the_data(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    rows, names = _most_rows(config, stage), ", ".join(data_of(stage))
    for key in ("prompts_per_iteration", "batch_size"):
        value = _value(stage.settings, key)
        if value is not None and value > rows:
            yield f"warning: {path}.{key} = {value!r}: more than the {rows} training rows of {names}"


def _late_warmup(config: RunConfig, path: str, stage: StageConfig) -> Iterator[str]:
    settings, steps = stage.settings, _most_steps(config, stage)
    if isinstance(settings, RlConfig) and settings.critic.warmup_iterations >= settings.num_iterations:
        named = f"{path}.critic.warmup_iterations = {settings.critic.warmup_iterations}"
        yield f"warning: {named}: none of the {settings.num_iterations} iterations trains the policy; is this intended?"
    for key in ("optim", "update.optim", "critic.optim"):
        value = _value(settings, f"{key}.warmup_steps")
        if value is not None and value > steps:
            named = f"{path}.{key}.warmup_steps = {value}"
            yield f"warning: {named}: the stage has at most {steps:g} steps; is this intended?"


def _most_steps(config: RunConfig, stage: StageConfig) -> float:
    """Return the number of a stage's optimizer steps if none is skipped; NaN if its rows are not known yet."""
    if isinstance(settings := stage.settings, RlConfig):
        return settings.num_iterations * settings.update.num_epochs * settings.update.num_minibatches
    epochs, batch = _value(settings, "num_epochs") or 1, _value(settings, "batch_size") or 1
    return _value(settings, "num_steps") or epochs * -(-_most_rows(config, stage) // batch)
