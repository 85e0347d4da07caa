"""Flows, one for each deployment, and what their parameters may be.

Prefect validates a request against the JSON schema of a flow's signature, so patterns check what they can;
``infra/services/deployments.py`` adds the stages of each preset. Other invalid keys and values end the run within its
first seconds. Prefect reads a parameter's description from the flow's docstring only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from rlcore.flows.plan import every_target
from rlcore.flows.presets import open_preset
from rlcore.flows.run import open_home, report_of, run_targets, start_run, watched
from rlcore.flows.stages import datasets, retrain_stages, stages
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.keys.plan import cached_refs, recorded_refs
from rlcore.tasks.kinds import BASE
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.operations.dump import make_dump
from rlcore.tasks.operations.garbage import collect
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import PromotionConfig, RetrainConfig
from rlcore.tasks.promotion.kind import promote_stages
from rlcore.tasks.promotion.promotion import (
    apply_decision,
    apply_signature,
    current_champion,
    doubt_first_champion,
    take_down,
)
from rlcore.tasks.run.pipeline import Report, is_unfinished, run_pipeline
from rlcore.tasks.run.prefect_bridge import report_markdown
from rlcore.tasks.run.retrain import Retraining, lineage_of, page_of, recipe_of
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import flatten
from rlcore.tasks.tracking.registry import ModelVersion
from rlcore.tasks.tracking.runs import open_tracker

logger = logging.getLogger("rlcore.promotion")
_PRESETS = sorted(file.stem for file in (Path(__file__).parent / "presets").glob("*.toml"))
_SECTIONS = sorted((*(each.name for each in fields(RunConfig)), "without"))

Preset = Annotated[
    str,
    Field(pattern=rf"^({'|'.join(_PRESETS)}|.+\.toml)$", examples=_PRESETS),
]
Override = Annotated[
    str, Field(pattern=rf"^({'|'.join(_SECTIONS)})(\.\w+)*=.+$", examples=["stages.grpo.learning_rate=1e-4"])
]
Overrides = tuple[Override, ...]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", examples=["grpo"])]
Algorithm = Annotated[str, Field(pattern=r"^[a-z0-9_+]*$", examples=["grpo"])]
Version = Annotated[str, Field(pattern=r"^.+/[0-9]+$", examples=["tiny-grpo/4"])]
Document = Annotated[str, Field(pattern=r"^\s*\{.*\}\s*$")]
Signature = Annotated[str, Field(pattern="^-----BEGIN SSH SIGNATURE-----")]


@flow(name="prepare-data", flow_run_name="prepare-data {preset}", persist_result=False)
def prepare_data(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Pass every dataset of the preset through its contract into a content-addressed snapshot.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, datasets(open_preset(preset, overrides)))


@flow(name="import-sft", flow_run_name="import-sft {preset}", persist_result=False)
def import_sft(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Import the preset's model into the store as verified safetensors.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, ["import_sft"])


@flow(name="sft", flow_run_name="sft {preset}", persist_result=False)
def sft(preset: Preset = "tiny", stage: Name = "sft", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Train a checkpoint on its demonstrations and evaluate it.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run, of the kind sft.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [f"evaluate_{stage}"])


@flow(name="reward-model", flow_run_name="reward-model {preset}", persist_result=False)
def reward_model(
    preset: Preset = "tiny", stage: Name = "reward_model", overrides: Overrides = ()
) -> dict[str, ArtifactRef]:
    """Train a reward model on its preference pairs and test it.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run, of the kind reward_model.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [stage])


@flow(name="online-rl", flow_run_name="{stage} {preset}", persist_result=False)
def online_rl(
    preset: Preset = "tiny",
    stage: Name = "grpo",
    algorithm: Algorithm = "",
    keys: dict[str, Any] | None = None,
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Run one stage of online RL and what it needs.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run.
        algorithm: The row of the table of algorithms; empty means the one of the stage.
        keys: Changed keys of the stage, as in its table of the preset.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    own = {"algorithm": algorithm or None, **flatten(keys or {})}
    changed = [f"stages.{stage}.{key}={json.dumps(value)}" for key, value in own.items() if value is not None]
    return run_targets(preset, [*changed, *overrides], [stage])


@flow(name="evaluate", flow_run_name="evaluate {preset}", persist_result=False)
def evaluate(
    preset: Preset = "tiny",
    checkpoint: Name = "sft",
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Measure greedy and sampled accuracy, with intervals, on the held-out problems.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        checkpoint: The checkpoint of the preset; it is made first if it is not cached.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [f"evaluate_{checkpoint}"])


@flow(name="compare", flow_run_name="compare {preset}", persist_result=False)
def compare(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Compare the checkpoints with paired tests on the same problems.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, ["compare"])


@flow(name="post-train", flow_run_name="post-train {preset}", persist_result=False)
def post_train(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Run data, every stage of the graph, an evaluation per checkpoint, and the comparison; cached by content.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, every_target(preset, overrides))


@flow(name="promote", flow_run_name="promote {preset}", persist_result=False)
def promote(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Evaluate both on the same held-out prompts, write the decision, move the aliases.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    home, config = start_run(preset, overrides, ["promote"], section=("promotion", PromotionConfig))
    with watched(home, config, "promote", preset, overrides):
        champion = current_champion(home, config)
        table = (*stages(config), *promote_stages(config, champion))
        report = report_of("promote", preset, overrides)
        refs = dict(run_pipeline(table, config, ["promote"], home=home, experiment=config.name, report=report))
        outcome = _apply(home, config, refs, over=champion)
    _tell("promotion", outcome)
    return refs


def _apply(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], *, over: ModelVersion | None) -> str:
    """Apply the decision; warn of a first champion that is not better than its base, if the base was evaluated."""
    outcome, base = apply_decision(home, config, refs, over=over), f"evaluate_{BASE}"
    known = {} if over else recorded_refs(stages(config), config, [base], home=home)
    if base in known and (doubt := doubt_first_champion(home, config, refs, known[base])):
        logger.warning("%s", doubt)
    return outcome


def _tell(act: str, outcome: str, page: str = "") -> str:
    logger.info("%s", outcome)
    report_markdown(f"outcome of the {act}", plain(outcome) + (page and f"\n\n{page}"))
    return outcome


@flow(name="retrain", flow_run_name="retrain {preset}", persist_result=False)
def retrain(preset: Preset = "retrain", overrides: Overrides = ()) -> Retraining:
    """Gate new data and their drift, then the reward model; RL from the champion; promote or reject. Idempotent.

    Args:
        preset: A built-in preset such as retrain, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    home, config = start_run(preset, overrides, ["promote"], section=("retrain", RetrainConfig))
    with watched(home, config, "retrain", preset, overrides):
        champion, report = current_champion(home, config), report_of("retrain", preset, overrides)
        if champion is None:
            logger.info("no champion yet: the whole preset runs from its base")
            table = (*stages(config), *promote_stages(config, None))
            done = _promote_retrained(home, config, table, None, report=report)
        else:
            done = _retrain_champion(home, config, champion, report=report)
    _tell("retraining", done.outcome, done.page)
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
    return _promote_retrained(home, config, table, champion, report=report)


def _is_unfinished(home: Home, config: RunConfig, targets: Collection[str]) -> bool:
    return is_unfinished(home, open_tracker(home), config.name, config, targets)


def _promote_retrained(
    home: Home, config: RunConfig, table: Sequence[Stage], champion: ModelVersion | None, *, report: Report
) -> Retraining:
    """Run what is not cached, then apply the decision; a cached decision is applied again."""
    targets = [stage.name for stage in table if stage.name in ("drift", "reward_gate", "promote")]
    refs = cached_refs(table, config, targets, home=home)
    known = "promote" in refs and not _is_unfinished(home, config, targets)
    if not known:
        refs = run_pipeline(table, config, targets, home=home, experiment=config.name, report=report)
    outcome = _apply(home, config, refs, over=champion)
    if known:
        outcome = f"nothing new: these inputs were trained on and compared before. {outcome}"
    return Retraining(
        result="unchanged" if known else "judged", outcome=outcome, page=page_of(home, config.name, refs), refs=refs
    )


@flow(name="rollback", flow_run_name="rollback {model} {version}", persist_result=False)
def rollback(
    model: Annotated[str, Field(pattern=r"^[^/:]+$")],
    version: Annotated[int, Field(ge=1)],
    reason: Annotated[str, Field(min_length=1)],
) -> str:
    """Make the previous champion of ``model`` champion again; ``version`` must be the present one.

    Args:
        model: Name of the registered model, such as tiny-grpo.
        version: The version to roll back, which must be the champion.
        reason: The reason, for the version's tags.
    """
    return _tell("roll-back", take_down(open_home(), model, version=version, reason=reason))


@flow(name="approve", flow_run_name="approve {version}", persist_result=False)
def approve(version: Version, document: Document, signature: Signature) -> str:
    """Approve a version that awaits a person's decision: it becomes champion.

    Args:
        version: The version that awaits a decision, such as tiny-grpo/4.
        document: The signed line of JSON. The run that asked for the decision shows it.
        signature: The output of ssh-keygen -Y sign -n rlcore for that line, by a key among the approvers.
    """
    return _decide(version, "approve", document, signature)


@flow(name="reject", flow_run_name="reject {version}", persist_result=False)
def reject(version: Version, document: Document, signature: Signature) -> str:
    """Reject a version that awaits a person's decision: it stays rejected until there is a new verdict.

    Args:
        version: The version that awaits a decision, such as tiny-grpo/4.
        document: The signed line of JSON. The run that asked for the decision shows it.
        signature: The output of ssh-keygen -Y sign -n rlcore for that line, by a key among the approvers.
    """
    return _decide(version, "reject", document, signature)


def _decide(version: str, decision: str, document: str, signature: str) -> str:
    outcome = apply_signature(open_home(), version, decision=decision, document=document, signature=signature)
    return _tell("decision", outcome)


@flow(name="gc", flow_run_name="gc older than {keep_days} days", persist_result=False)
def gc(keep_days: Annotated[int, Field(ge=0)] = 30) -> str:
    """Remove what no registered version, run or preset needs; the records of what goes stay.

    Args:
        keep_days: Age in days from which something can go.
    """
    text = collect(open_home(), keep_days=keep_days).text
    report_markdown("what was cleaned", f"```text\n{text}```")
    return text


@flow(name="dump", persist_result=False)
def dump() -> str:
    """Dump the databases of the worker's state directory into its folder dumps, and keep the newest few."""
    text = make_dump(open_home())
    report_markdown("dump", text)
    return text
