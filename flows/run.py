"""Common start of all flows: read the preset, then run the stages that its targets need."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlcore.errors import ConfigError
from rlcore.flows.plan import preflight_lines
from rlcore.flows.presets import FOLDER, open_preset, preset_path
from rlcore.flows.stages import promotion_stages, retrain_stages, stages
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.keys.plan import cached_refs, recorded_refs
from rlcore.tasks.kinds import BASE
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig, read_chain
from rlcore.tasks.presets.settings import PromotionConfig, RetrainConfig
from rlcore.tasks.promotion.promotion import (
    apply_decision,
    apply_signature,
    current_champion,
    doubt_first_champion,
    take_down,
)
from rlcore.tasks.report.run_info import Origin
from rlcore.tasks.report.run_page import publish_report
from rlcore.tasks.run.budget import budget_period
from rlcore.tasks.run.pipeline import Report, is_unfinished, run_pipeline
from rlcore.tasks.run.prefect_bridge import report_markdown
from rlcore.tasks.run.retrain import Retraining, lineage_of, page_of, recipe_of
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.settings import Home, configure_environment, configure_logging, find_home
from rlcore.tasks.store.storage import raise_on_full_disk
from rlcore.tasks.tracking.registry import ModelVersion
from rlcore.tasks.tracking.runs import open_tracker

logger = logging.getLogger("rlcore.promotion")
plan_logger = logging.getLogger("rlcore.plan")


def run_targets(preset: str, overrides: Sequence[str], targets: Collection[str]) -> dict[str, ArtifactRef]:
    """Run the stages that the targets need; return the artifacts by stage name."""
    home, config = _start(preset, overrides, targets)
    report = _report("run", preset, overrides)
    with _watched(home, config, "run", preset, overrides):
        return dict(run_pipeline(stages(config), config, targets, home=home, experiment=config.name, report=report))


def _start(
    preset: str, overrides: Sequence[str], targets: Collection[str], *, section: tuple[str, type[Any]] | None = None
) -> tuple[Home, RunConfig]:
    """Open a preset, require a section, and check the run; return the state directory and the preset."""
    home = _open_home()
    config = open_preset(preset, overrides)
    if section:
        config.section(*section, where=preset)
    lines = preflight_lines(config, targets, preset=preset, home=home)
    for line in lines:  # the memory plan follows when the model is imported
        if line.startswith(("warning:", "evaluation:")):
            plan_logger.warning("%s", line)
    return home, config


@contextmanager
def _watched(home: Home, config: RunConfig, name: str, preset: str, overrides: Sequence[str]) -> Iterator[None]:

    def resume(limit: str) -> str:
        key = limit.partition("=")[0]
        return _command(name, preset, [*(each for each in overrides if each.partition("=")[0] != key), limit])

    with raise_on_full_disk(home.root), budget_period(home, config, resume=resume):
        yield


def _command(name: str, preset: str, overrides: Sequence[str]) -> str:
    return shlex.join(["rlcore", name, preset, *(word for each in overrides for word in ("--set", each))])


def _report(name: str, preset: str, overrides: Sequence[str]) -> Report:
    command, base_name = _command(name, preset, overrides), _extended(preset)
    try:
        base = open_preset(base_name) if overrides or base_name != preset else None
    except ConfigError:  # incomplete by itself
        base = None
    return partial(publish_report, origin=Origin(command=command, base_name=base_name, base=base))


def _extended(preset: str) -> str:
    """Return the preset that one extends, for :func:`open_preset`; itself if it extends none."""
    *_, base, _ = (None, *read_chain(preset_path(preset), FOLDER))
    return preset if base is None else base.stem if base.parent == FOLDER else str(base)


def run_promotion(preset: str, overrides: Sequence[str]) -> dict[str, ArtifactRef]:
    """Run what is not cached, decide on the challenger, and move the registry's aliases accordingly."""
    home, config = _start(preset, overrides, ["promote"], section=("promotion", PromotionConfig))
    with _watched(home, config, "promote", preset, overrides):
        champion = current_champion(home, config)
        table = promotion_stages(config, champion)
        report = _report("promote", preset, overrides)
        refs = dict(run_pipeline(table, config, ["promote"], home=home, experiment=config.name, report=report))
        outcome = _apply_decision(home, config, refs, over=champion)
    logger.info("%s", outcome)
    report_markdown("outcome of the promotion", plain(outcome))
    return refs


def _apply_decision(
    home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], *, over: ModelVersion | None
) -> str:
    """Apply the decision; warn of a first champion that is not better than its base, if the base was evaluated."""
    outcome, base = apply_decision(home, config, refs, over=over), f"evaluate_{BASE}"
    known = {} if over else recorded_refs(stages(config), config, [base], home=home)
    if base in known and (doubt := doubt_first_champion(home, config, refs, known[base])):
        logger.warning("%s", doubt)
    return outcome


def run_retrain(preset: str, overrides: Sequence[str]) -> Retraining:
    """Continue training the champion on new data, and promote a better model; without new data do nothing.

    Without a champion the whole preset runs, and its result must meet only its own limits.
    Raises:
        ConfigError: the preset lacks the section ``retrain`` or ``promotion``.
        DataError: the new data break their contract, or drift too far from the last accepted.
        TrainingError: the new reward model failed its gate.
    """
    home, config = _start(preset, overrides, ["promote"], section=("retrain", RetrainConfig))
    with _watched(home, config, "retrain", preset, overrides):
        champion, report = current_champion(home, config), _report("retrain", preset, overrides)
        if champion is None:
            logger.info("no champion yet: the whole preset runs from its base")
            done = _run_promotion(home, config, promotion_stages(config, None), None, report=report)
        else:
            done = _retrain_champion(home, config, champion, report=report)
    logger.info("%s", done.outcome)
    report_markdown("outcome of the retraining", f"{plain(done.outcome)}\n\n{done.page}")
    return done


def _retrain_champion(home: Home, config: RunConfig, champion: ModelVersion, *, report: Report) -> Retraining:
    past = lineage_of(home, champion)
    table = retrain_stages(config, champion, past)
    by_name = {stage.name: stage for stage in table}
    rl = by_name[config.section("promotion", PromotionConfig).challenger]
    gates = [name for name in (*rl.inputs, "drift", "reward_gate") if name in by_name and name != "champion"]
    refs = cached_refs(table, config, gates, home=home)
    if not refs.keys() >= set(gates) or _is_unfinished(home, config, gates):
        refs = run_pipeline(table, config, gates, home=home, experiment=config.name)
    if recipe_of(home, key_inputs(rl, config, refs)) == past.recipe:
        outcome = f"nothing to do: version {champion.version} of {champion.name} was made from these very inputs"
        return Retraining(result="unchanged", outcome=outcome, page=page_of(home, config.name, refs), refs=refs)
    return _run_promotion(home, config, table, champion, report=report)


def _is_unfinished(home: Home, config: RunConfig, targets: Collection[str]) -> bool:
    return is_unfinished(home, open_tracker(home), config.name, config, targets)


def _run_promotion(
    home: Home, config: RunConfig, table: Sequence[Stage], champion: ModelVersion | None, *, report: Report
) -> Retraining:
    """Run what is not cached, then apply the decision; a cached decision is applied again."""
    targets = [stage.name for stage in table if stage.name in ("drift", "reward_gate", "promote")]
    refs = cached_refs(table, config, targets, home=home)
    known = "promote" in refs and not _is_unfinished(home, config, targets)
    if not known:
        refs = run_pipeline(table, config, targets, home=home, experiment=config.name, report=report)
    outcome = _apply_decision(home, config, refs, over=champion)
    if known:
        outcome = f"nothing new: these inputs were trained on and compared before. {outcome}"
    return Retraining(
        result="unchanged" if known else "judged", outcome=outcome, page=page_of(home, config.name, refs), refs=refs
    )


def run_rollback(model: str, version: int, reason: str) -> str:
    """Roll back the champion ``version`` of a registered model; return a sentence with the new champion."""
    outcome = take_down(_open_home(), model, version=version, reason=reason)
    logger.info("%s", outcome)
    report_markdown("outcome of the roll-back", plain(outcome))
    return outcome


def run_signed(version: str, *, decision: str, document: str, signature: str) -> str:
    """Apply a person's signed decision on a version that awaits one; return a sentence."""
    outcome = apply_signature(_open_home(), version, decision=decision, document=document, signature=signature)
    logger.info("%s", outcome)
    report_markdown("outcome of the decision", plain(outcome))
    return outcome


def _open_home() -> Home:
    home = find_home()
    configure_environment(home)
    configure_logging()
    return home
