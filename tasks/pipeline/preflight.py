"""Preflight: all checks that are possible before a run. Errors are reported together, each with its full key.

It builds rewards and looks for datasets, files, templates and registered models. It trains and downloads nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from transformers import PretrainedConfig

from rlcore.config import EngineConfig, EpisodeConfig, ModelConfig, RewardTerm, SamplingConfig
from rlcore.data_contracts.adapters.convert import is_generator
from rlcore.errors import ConfigError, RlcoreError
from rlcore.hardware.machine import choose_device_and_dtype
from rlcore.models.source_files import find_package_file
from rlcore.rewards.pair_judge import make_pair_judge
from rlcore.rewards.table import placeholder_model, reward_errors
from rlcore.sampling.vllm.gpu_assignment import is_installed
from rlcore.tasks.kinds import load
from rlcore.tasks.kinds.facts import BASE, StageConfig
from rlcore.tasks.kinds.kind import kind_of
from rlcore.tasks.pipeline.config_warnings import unusual_values
from rlcore.tasks.pipeline.curves import tool_errors
from rlcore.tasks.pipeline.memory_plan import memory_lines, model_of
from rlcore.tasks.pipeline.reference_checks import promotion_reference_errors, reference_errors, unmeasured_line
from rlcore.tasks.pipeline.sizes import disk_summary, position_errors
from rlcore.tasks.presets import stages as parts_of_stages
from rlcore.tasks.presets.data import HUB, POLICY
from rlcore.tasks.presets.error_collection import collect_error
from rlcore.tasks.presets.evaluation import EvaluationConfig
from rlcore.tasks.presets.graph import REGISTRY, required_by
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.data_source import check_options, hub_parts, resolve_adapter
from rlcore.tasks.steps.episodes import environment_errors
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import read_version
from rlcore.text.tokenization import ChatTokenizer

_SANDBOX = "as root: apt-get install bubblewrap (Fedora: dnf install bubblewrap)"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """Facts of a run before it starts: its preset, state directory, and existing artifacts of its stages."""

    config: RunConfig
    home: Home
    refs: Mapping[str, ArtifactRef]

    @cached_property
    def model(self) -> PretrainedConfig | None:
        """Return the base's configuration; None if it must still be fetched or cannot be read."""
        try:
            return model_of(self.config, self.home, self.refs)
        except (OSError, ValueError):  # a damaged folder, which the import reports
            return None

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        """Return the run's tokenizer if it is available before the import."""
        model = self.config.model
        known = self.home.root / self.refs["import_sft"].uri / MODEL if "import_sft" in self.refs else Path(model.path)
        if "import_sft" not in self.refs and (model.source != "folder" or model.chat_template):
            return None
        try:
            return ChatTokenizer.load(known)
        except (RlcoreError, OSError):  # which the import reports in detail
            return None


def preflight(
    config: RunConfig, home: Home, targets: Collection[str] | None, refs: Mapping[str, ArtifactRef] | None
) -> list[str]:
    """Return human-readable lines: unusual values, memory plan, disk. ``targets`` None: all stages of the preset.

    Errors in the graph of ``config`` are reported with the others if ``targets`` is None. ``refs``: the artifacts of
    the stages that do not run again. If None, skip memory and disk: computing it reads all sources.
    Raises:
        ConfigError: with each error on a line, followed by unusual values.
    """
    context = PreflightContext(config=config, home=home, refs=refs or {})
    stages, data = (tuple(config.stages), tuple(config.data)) if targets is None else required_by(config, targets)
    is_evaluated = targets is None or any(_evaluates(config, target) for target in targets)
    errors = [
        *config.errors,
        *tool_errors(config.tracking),
        *_model(config.model),
        *collect_error("hardware.device", lambda: choose_device_and_dtype(config.hardware)),
        *chain(*(_stage(context, name) for name in stages)),
        *chain(*(_data(config, name) for name in data)),
        *(_evaluation(config) if is_evaluated else ()),
        *position_errors(config, context.model, stages, data, is_evaluated=is_evaluated),
        *reference_errors(config, stages, data),
        *(promotion_reference_errors(config) if "promote" in (targets or ()) else ()),
    ]
    odd = unusual_values(config, stages)
    lines = [*odd, *(() if errors else unmeasured_line(config, data))]
    if not errors and refs is not None:  # only sizes of a valid preset are meaningful
        new = [name for name in stages if name not in refs]
        errors = collect_error("memory", lambda: lines.extend(_memory(context, stages)))
        errors += collect_error("disk", lambda: lines.append(disk_summary(config, context.model, new, home.root)))
    if errors := list(dict.fromkeys(errors)):
        raise ConfigError(
            "\n    ".join((f"preset has {len(errors)} error{'s' * (len(errors) > 1)}:", *errors, *odd)),
            where=f"preset {config.name}",
            fix="correct these keys; nothing was run",
        )
    return list(filter(None, lines))


def _memory(context: PreflightContext, stages: Collection[str]) -> list[str]:
    """Return the memory plan; only its first line if the model must still be fetched."""
    known = context.refs if context.model else {}
    return memory_lines(context.config, context.home, known, stages)


def _model(config: ModelConfig) -> Iterator[str]:
    path = Path(config.path)
    if config.source == "hub" and not _COMMIT.fullmatch(config.revision):
        yield (
            f"model.revision = {config.revision!r}: not a commit; name the 40 hexadecimal digits of one, since "
            "branches and tags can be moved"
        )
    if config.source == "folder" and not (path / "config.json").is_file():
        yield f"model.path = {config.path!r}: there is no model in this folder; it needs a config.json"
    if config.source == "gguf" and not path.is_file():
        yield f"model.path = {config.path!r}: no such file"
    if config.source == "package":
        yield from collect_error("model.path", lambda: find_package_file(config.path, config.file))
    if config.chat_template and not Path(config.chat_template).is_file():
        yield f"model.chat_template = {config.chat_template!r}: no such file; leave it out to take the model's own"


def _evaluates(config: RunConfig, target: str) -> bool:
    """Return True if a stage of the pipeline is or needs an evaluation."""
    return target not in (*config.stages, "import_sft") and not target.startswith("prepare_")


def _engine_of(config: RunConfig, path: str, section: SamplingConfig | EvaluationConfig) -> Iterator[str]:
    """Return the engine of a section: its own, or the run's."""
    return _engine(f"{path}.engine" if section.engine else "engine", config.engine_of(section))


def _engine(path: str, engine: EngineConfig) -> Iterator[str]:
    if engine.kind == "native" or engine.urls:
        return
    if engine.python and shutil.which(engine.python) is None:
        yield f"{path}.python = {engine.python!r}: no such program; name the interpreter that has vLLM"
    elif not engine.python and not is_installed():
        yield f"{path}.kind = {engine.kind!r}: vLLM is not installed here; install it, or take engine.kind = 'native'"


def _stage(context: PreflightContext, name: str) -> Iterator[str]:
    path, stage = f"stages.{name}", context.config.stages[name]
    yield from _start(context, name)
    if checks := kind_of(stage.kind).checks:
        yield from load(checks)(path, stage)
    sampling = parts_of_stages.sampling_of(stage)
    if sampling:
        prefill = context.tokenizer.prefill if context.tokenizer else ""
        yield from reward_errors(parts_of_stages.rewards_of(stage), f"{path}.rewards", prefill=prefill)
        if judge := parts_of_stages.judge_of(stage):
            known = {judge.stage: placeholder_model} if judge.stage else {}
            at = f"{path}.judge"
            yield from collect_error(at, lambda: make_pair_judge(judge, where=at, score_tokens=known))
        yield from _files(path, stage)
        yield from _sandbox(f"{path}.rewards", parts_of_stages.rewards_of(stage))
        yield from _episodes(f"{path}.sampling.episodes", sampling.episodes)
        yield from environment_errors(sampling.episodes, f"{path}.sampling.episodes")
        yield from _engine_of(context.config, f"{path}.sampling", sampling)


def _episodes(path: str, episodes: EpisodeConfig) -> Iterator[str]:
    """Check the requirements of tools."""
    if episodes.search_corpus and not Path(episodes.search_corpus).is_file():
        yield f"{path}.search_corpus = {episodes.search_corpus!r}: no such file"
    if "python" in episodes.tools and shutil.which("bwrap") is None:
        yield f"{path}.tools: 'python' runs in a sandbox, and bubblewrap is not installed; {_SANDBOX}"


def _sandbox(path: str, terms: Sequence[RewardTerm]) -> Iterator[str]:
    """Check the sandbox, which verifies programs of a policy unless a reward term needs none."""
    for place, term in enumerate(terms):
        is_walled = term.kind == "code" and term.options.get("backend", "bubblewrap") == "bubblewrap"
        if is_walled and shutil.which("bwrap") is None:
            yield f"{path}.{place}: programs run in a sandbox, and bubblewrap is not installed; {_SANDBOX}"


def _files(path: str, stage: StageConfig) -> Iterator[str]:
    """Check the files that custom functions read."""
    for key, term in parts_of_stages.terms_of(stage).items():
        for number, file in enumerate(term.files):
            if not Path(file).is_file():
                yield f"{path}.{key}.files.{number} = {file!r}: no such file"


def _data(config: RunConfig, name: str) -> list[str]:
    data, path = config.data[name], f"data.{name}"
    errors = collect_error(f"{path}.adapter", lambda: resolve_adapter(data))
    errors = errors or collect_error(f"{path}.options", lambda: check_options(data.kind, data))
    if errors:
        return errors
    adapter = resolve_adapter(data)
    if adapter == POLICY:
        return list(_engine("engine", config.engine))
    if is_generator(adapter):
        return []
    found = _source(f"{path}.path", data.path, adapter, "set fallback")
    if data.eval_path:
        found += _source(f"{path}.eval_path", data.eval_path, adapter, "leave it out, to hold out rows of path")
    return found


def _source(key: str, source: str, adapter: str, otherwise: str) -> list[str]:
    """Check the file or hub dataset that an adapter reads."""
    if source.startswith(HUB):
        return collect_error(key, lambda: hub_parts(source))
    if Path(source).is_file():
        return []
    return [f"{key} = {source!r}: no such file, and the adapter {adapter!r} reads one; or {otherwise}"]


def _evaluation(config: RunConfig) -> Iterator[str]:
    terms = tuple(verifier.term for verifier in config.evaluation.verifiers)
    for error in reward_errors(terms, "evaluation.verifiers"):
        if "named twice" not in error:  # the graph has checked which of them decide on a dataset
            yield error
    yield from _sandbox("evaluation.verifiers", terms)
    yield from _engine_of(config, "evaluation", config.evaluation)


def _start(context: PreflightContext, name: str) -> Iterator[str]:
    """Check that registered models for start or reference policy exist and have the run's tokenizer."""
    stage: StageConfig = context.config.stages[name]
    named = (
        (parts_of_stages.start_key(stage), parts_of_stages.named_start(stage)),
        (parts_of_stages.reference_key(stage), parts_of_stages.reference_of(stage)),
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
    if folders and context.tokenizer and not ChatTokenizer.load(folders[0]).is_same_as(context.tokenizer):
        yield (
            f"{key}: this model has another tokenizer than the run's; take a model of the same family, or make "
            "it the base: model.source = 'registry'"
        )
