"""Promotion: apply a decision to the registry, and find the champion for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from rlcore.errors import PromotionError
from rlcore.evaluation.paired_tests import paired_difference
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.kinds.compare.step import greedy_answers
from rlcore.tasks.kinds.promote.names import model_name
from rlcore.tasks.pipeline.events import emit_rejection
from rlcore.tasks.pipeline.leases import leased
from rlcore.tasks.presets.promotion import PromotionConfig
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking import registry
from rlcore.tasks.tracking.model_descriptions import refresh_cards
from rlcore.tasks.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS, ModelVersion
from rlcore.tasks.tracking.runs import Tracker, open_tracker


def registered_name(config: RunConfig) -> str:
    """Return the registered model that the challenger's stage adds versions to."""
    return model_name(config.name, config.section("promotion", PromotionConfig))


def current_champion(home: Home, config: RunConfig) -> ModelVersion | None:
    """Return the champion that the challenger is compared with, or None before the first promotion.

    Raises:
        PromotionError: there was a champion, and now no version is champion.
    """
    tracker, name = open_tracker(home), registered_name(config)
    champion = registry.find_champion(home, tracker, name)
    if champion is None and (last := registry.last_champion(tracker, name)):
        raise PromotionError(
            f"no version has the alias {CHAMPION!r}, and version {last} was champion last: there is nothing to judge "
            "against",
            where=f"registered model {name}",
            fix=f"give a version that alias again in MLflow, or delete the model's tag {CHAMPION!r} and the alias "
            f"{PREVIOUS!r} to begin without a champion",
        )
    return champion


def doubt_first_champion(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], base: ArtifactRef) -> str:
    """Return a warning about a first champion that is not shown to be better than its base; empty if it is.

    ``base``: the evaluation of the base on the same problems.
    """
    store, challenger = ArtifactStore(home.root), config.section("promotion", PromotionConfig).challenger
    new, old = (greedy_answers(store.path(ref))["correct"].tolist() for ref in (refs[f"evaluate_{challenger}"], base))
    if not new or not read_json(store.path(refs["promote"]) / "verdict.json")["verdict"]["promote"]:
        return ""
    level = config.evaluation.confidence
    gain = paired_difference(new, old, confidence=level).difference
    if gain.low > 0.0:
        return ""
    return (
        f"first champion of {registered_name(config)}: no earlier one to beat, and its accuracy {mean(new):.3f} is not "
        f"shown to be above its base's {mean(old):.3f} (difference {gain.mean:+.3f}, {format_level(level)} interval "
        f"[{gain.low:+.3f}, {gain.high:+.3f}], n = {gain.n})"
    )


def apply_decision(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], *, over: ModelVersion | None) -> str:
    """Apply the decision to the registry and return a sentence about it. A repeated call changes nothing.

    Raises:
        PromotionError: the champion has changed since the comparison, or the version was rolled back.
    """
    name, challenger = registered_name(config), config.section("promotion", PromotionConfig).challenger
    tracker = open_tracker(home)
    version = registry.find_by_sha256(tracker, name, refs[challenger].sha256)
    if version is None:
        raise PromotionError("the challenger is no longer in the registry", where=f"registered model {name}")
    decision = read_json(ArtifactStore(home.root).path(refs["promote"]) / "verdict.json")["verdict"]
    if decision["look"] == 0:
        return f"{name}: {decision['sentence']}"
    tags = {
        "verdict": decision["sentence"][:5000],
        "verdict_artifact": refs["promote"].sha256,
        "judged_over": str(over.version) if over else "none",
    }
    with leased(home, config.name):
        try:
            if decision["promote"]:
                registry.promote(home, tracker, version, over=over, tags=tags)
            else:
                _refuse(tracker, version, tags)
        except PromotionError as error:
            _refuse(tracker, version, tags | {"verdict": f"Not promoted: {error.what}."})
            raise
        finally:
            refresh_cards(home, tracker, [version])
    return f"{name} version {version.version}: {decision['sentence']}"


def _refuse(tracker: Tracker, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Leave the champion unchanged and record the rejection at the challenger."""
    is_new = registry.read_tags(tracker, version).get("verdict_artifact") != tags["verdict_artifact"]
    registry.set_tags(tracker, version, tags)
    registry.set_alias(tracker, version, CHALLENGER)
    if is_new:
        emit_rejection(version.name, version.version, tags["verdict"])
