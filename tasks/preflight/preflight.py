"""Preflight: all checks that are possible before a run. Errors are reported together, by file, each with its full key.

It builds rewards, tries the first rows of each file and the tokenizer, and looks for datasets, templates, packages and
registered models. It trains and downloads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError
from itertools import chain
from typing import Any

from rlcore.config import ModelConfig, RewardTerm, to_dict
from rlcore.errors import ModelError, RlcoreError, StorageError
from rlcore.rewards.user_function import columns_needed, lacking
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import IMPORT
from rlcore.tasks.preflight.findings import Finding, key_of, refusal, row_findings
from rlcore.tasks.preflight.model_checks import (
    ModelFacts,
    adapter_errors,
    extras_errors,
    model_facts,
    source_errors,
    target_errors,
)
from rlcore.tasks.preflight.preset_checks import (
    PreflightContext,
    above_budget,
    budget_errors,
    data_errors,
    evaluation_errors,
    stage_errors,
    tool_errors,
    uncounted,
    unread_data,
    unusual_values,
)
from rlcore.tasks.preflight.reference_checks import (
    first_prompts,
    promotion_reference_errors,
    reference_errors,
    unmeasured_line,
)
from rlcore.tasks.preflight.sizes import disk_summary, memory_lines, position_errors
from rlcore.tasks.presets.graph import data_of, evaluated_data, required_by, rewards_of
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.steps.base import prepare_stage_name
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.remembered import remembering
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import flatten


def preflight(
    config: RunConfig,
    home: Home,
    targets: Collection[str] | None,
    refs: Mapping[str, ArtifactRef] | None,
    *,
    preset: str,
    earlier: Iterable[str] = (),
) -> list[str]:
    """Return human-readable lines: unusual values, rows left out, memory plan, disk, time.

    ``targets`` None: all stages, and errors of the graph are reported with the others. ``refs``: the artifacts of the
    stages that do not run again; None: skip memory, disk and time. ``preset``: as the user names it. ``earlier``:
    errors of reading it; errors of their keys follow from them.
    Raises:
        ConfigError: with each error on a line, followed by unusual values.
    """
    with remembering(home.source_facts):
        return _preflight(config, home, targets, refs, preset=preset, earlier=list(earlier))


def _preflight(
    config: RunConfig,
    home: Home,
    targets: Collection[str] | None,
    refs: Mapping[str, ArtifactRef] | None,
    *,
    preset: str,
    earlier: Sequence[str],
) -> list[str]:
    known = refs or {}
    stages, data = (tuple(config.stages), tuple(config.data)) if targets is None else required_by(config, targets)
    is_evaluated = targets is None or any(_evaluates(config, target) for target in targets)
    wrong = {key_of(error) for error in earlier}
    model = ModelFacts() if any(key.startswith("model.") for key in wrong) else model_facts(config, home, known)
    context = PreflightContext(config=config, home=home, refs=known, model=model)
    own = [
        *([] if earlier and _lacks_tables(config, earlier) else config.errors),
        *tool_errors(config.tracking),
        *source_errors(config.model),
        *extras_errors(config, stages, is_imported=IMPORT in known),
        *target_errors(config, stages, model.size),
        *adapter_errors(config, stages),
        *collect_error("hardware.device", lambda: known_machine(config.hardware)),
        *budget_errors(config, home),
        *chain(*(stage_errors(context, name) for name in stages)),
        *chain(*(data_errors(config, name) for name in data)),
        *(evaluation_errors(config) if is_evaluated else ()),
        *position_errors(config, model.positions, stages, data, is_evaluated=is_evaluated),
        *chain(reference_errors(config, stages, data), column_errors(config, stages, is_evaluated=is_evaluated)),
        *(promotion_reference_errors(config) if "promote" in (targets or ()) else ()),
    ]
    texts = [*earlier, *(text for text in own if key_of(text) not in wrong)]
    unreadable = {name for name in data if any(key_of(text) == f"data.{name}.adapter" for text in texts)}
    new = [name for name in data if prepare_stage_name(name) not in known and name not in unreadable]
    rows, left_out = row_findings(config, new, model.files)
    unusable = model.error and not any(source_errors(config.model)) and _tokenizer_finding(config.model, model.error)
    findings = [*(Finding(text=text) for text in texts), *rows, *([unusable] if unusable else [])]
    unread = unread_data(config) if set(stages) == set(config.stages) else []
    odd = [*unusual_values(config, stages), *unread, *uncounted(config), *left_out]
    odd = [line for line in odd if key_of(line.removeprefix("warning: ")) not in wrong]
    lines = [*odd, *(() if findings else unmeasured_line(config, data))]
    if refs is not None:
        found, texts = _sizes(context, stages, targets, is_valid=not findings)
        lines += found
        findings += [Finding(text=text) for text in texts]
    if findings:
        raise refusal(list(dict.fromkeys(findings)), odd, preset=preset)
    return list(filter(None, lines))


def _tokenizer_finding(model: ModelConfig, error: ModelError) -> Finding:
    key = "model.path" if model.source in ("folder", "gguf") else "model"
    fix = f"; {error.fix}" if error.fix else ""
    return Finding(file=error.where or model.path, text=f"{key}: {error.what}{fix}")


def _lacks_tables(config: RunConfig, errors: Iterable[str]) -> bool:
    """Return True if a stage or dataset could not be built: errors of the graph would follow."""
    parts = [key_of(error).split(".") for error in errors]
    named = {(part[0], part[1]) for part in parts if part[0] in ("stages", "data") and len(part) > 1}
    return any(name not in getattr(config, section) for section, name in named)


def _sizes(
    context: PreflightContext, stages: Collection[str], targets: Collection[str] | None, *, is_valid: bool
) -> tuple[list[str], list[str]]:
    config, home = context.config, context.home
    new = [name for name in stages if name not in context.refs]
    lines: list[str] = []
    errors: list[str] = []
    work: dict[str, Callable[[], list[str]]] = {
        "memory": lambda: memory_lines(config, context.model.size, new),
        "disk": lambda: [disk_summary(config, context.model.size, new, home.root)],
    }
    for key, measure in work.items():
        try:
            lines += measure()
        except RlcoreError as error:
            if is_valid or isinstance(error, StorageError) or error.where == key:
                errors += [f"{key}: {error.what}; {error.fix}"]
        except (KeyError, CycleError):  # of a graph with errors
            if is_valid:
                raise
    if not is_valid or errors or not new:
        return lines, errors
    pending = [*new, *(each for each in (targets or ()) if each not in (*config.stages, *context.refs))]
    lines += time_lines(config, tuple(dict.fromkeys(pending)), home)
    machine = known_machine(config.hardware)
    return [*lines, *(f"precision: {each}" for each in (machine.warning, machine.hint) if each)], []


def _evaluates(config: RunConfig, target: str) -> bool:
    return target not in (*config.stages, "import_sft") and not target.startswith("prepare_")


def column_errors(config: RunConfig, stages: Collection[str], *, is_evaluated: bool) -> Iterator[str]:
    """Yield reward functions and verifiers that need a column which no row of their datasets has."""
    for name in stages:
        data = data_of(config.stages[name])
        for place, term in enumerate(rewards_of(config.stages[name])):
            yield from _errors(config, f"stages.{name}.rewards.{place}", term, data)
    for place, verifier in enumerate(config.evaluation.verifiers if is_evaluated else ()):
        yield from _errors(config, f"evaluation.verifiers.{place}", verifier.term, evaluated_data(config))


def _errors(config: RunConfig, path: str, term: RewardTerm, data: Collection[str]) -> Iterator[str]:
    needed = columns_needed(term) if term.module else []
    names = [name for name in data if not term.data or name in term.data]
    if not needed or not all(name in config.data for name in names):
        return
    rows = [first_prompts(config.data[name]) for name in names]
    columns = {column for found in rows for column in found.columns}
    if all(found.count for found in rows) and (lacks := lacking(needed, columns, term.kind)):
        yield f"{path}: {lacks[0]}; {lacks[1]}"


# Settings that multiply the work of a stage: their ratio scales the time of an earlier run.
_FACTORS = (
    *("num_iterations", "prompts_per_iteration", "group_size", "num_samples", "max_new_tokens"),
    *("num_steps", "num_epochs"),
)
_ALIKE = 10.0  # times the work: a larger or smaller run says little, because part of its time does not scale


def time_lines(config: RunConfig, stages: Collection[str], home: Home) -> list[str]:
    """Return a line on the time that the stages take, with those of unknown time, and warnings about the budget."""
    found = {name: _seconds(config, name, StageCache(home.cache)) for name in stages}
    known = {name: seconds for name, seconds in found.items() if seconds is not None}
    if not known:
        return ["time: unknown; none of these stages ran on this machine before"] if found else []
    unknown = f"unknown for {', '.join(name for name in found if name not in known)}" if len(known) < len(found) else ""
    total = sum(known.values())
    longest = sorted(known, key=lambda name: -known[name])[:3]
    parts = ", ".join(f"{name} {_shown(known[name])}" for name in longest if known[name] >= 1)
    line = f"time: about {_shown(total)}{parts and f' ({parts})'} by earlier runs on this machine"
    return ["; ".join(filter(None, (line, unknown))), *above_budget(config, home, total)]


def _seconds(config: RunConfig, name: str, cache: StageCache) -> float | None:
    machine, settings = known_machine(config.hardware).facts, _settings(config, name)
    records = [each for each in cache.records(name) if each.ingredients.get("machine") in (machine, {})]
    alike = [each for each in records if 1 / _ALIKE <= _ratio(settings, each) <= _ALIKE]
    last = max(alike, key=lambda each: each.created, default=None)
    return None if last is None else last.seconds * _ratio(settings, last)


def _settings(config: RunConfig, name: str) -> dict[str, Any]:
    if name in config.stages:
        return flatten(to_dict(config.stages[name].settings))
    return flatten(to_dict(config.evaluation)) if name.startswith("evaluate_") else {}


def _factor(settings: Mapping[str, Any]) -> float:
    values = (value for key, value in settings.items() if key.rpartition(".")[2] in _FACTORS and value)
    return math.prod(float(value) for value in values if isinstance(value, int | float))


def _ratio(settings: Mapping[str, Any], record: Record) -> float:
    config = record.ingredients.get("config", {})
    before = _factor(flatten(config.get("stage") or config.get("evaluation") or {}))
    return _factor(settings) / before if settings and before else 1.0


def _shown(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
