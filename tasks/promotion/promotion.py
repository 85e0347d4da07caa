"""Promotion: apply decisions of the gate and of people to the registry, and find the champion for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

from rlcore.errors import PromotionError
from rlcore.evaluation.paired_tests import paired_difference
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.kinds.compare.step import greedy_answers
from rlcore.tasks.kinds.promote.kind import model_name
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import PromotionConfig
from rlcore.tasks.promotion.approval import ask_person, current_actor, decide
from rlcore.tasks.run.events import PROMOTED, REFUSED, ROLLED_BACK, tell_act
from rlcore.tasks.run.leases import leased
from rlcore.tasks.store.approvers import read_approvers
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking import champion, registry
from rlcore.tasks.tracking.champion import Grounds
from rlcore.tasks.tracking.model_card import refresh_cards
from rlcore.tasks.tracking.registry import ModelVersion
from rlcore.tasks.tracking.runs import Tracker, open_tracker


def registered_name(config: RunConfig) -> str:
    """Return the registered model that the challenger's stage adds versions to."""
    return model_name(config.name, config.section("promotion", PromotionConfig))


def current_champion(home: Home, config: RunConfig) -> ModelVersion | None:
    """Return the champion that the challenger is compared with, or None before the first promotion.

    Raises:
        PromotionError: as for :func:`rlcore.tasks.tracking.champion.find_champion`.
    """
    return champion.find_champion(home, open_tracker(home), registered_name(config))


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

    A version that passed awaits a person, if ``promotion.toml`` names approvers; else it becomes champion.
    Raises:
        PromotionError: the champion has changed since the comparison, the version was rolled back, or
            ``promotion.toml`` cannot be used.
    """
    promotion = config.section("promotion", PromotionConfig)
    name, tracker = registered_name(config), open_tracker(home)
    version = registry.find_by_sha256(tracker, name, refs[promotion.challenger].sha256)
    if version is None:
        raise PromotionError("the challenger is no longer in the registry", where=f"registered model {name}")
    decision = read_json(ArtifactStore(home.root).path(refs["promote"]) / "verdict.json")["verdict"]
    if decision["look"] == 0:
        return f"{name}: {decision['sentence']}"
    grounds = Grounds(over=over, verdict=refs["promote"].sha256, sentence=decision["sentence"])
    with leased(home, config.name):
        try:
            if decision["promote"] and read_approvers(home).are_needed:
                text = ask_person(home, tracker, version, grounds)
            else:
                text = _conclude(home, tracker, version, grounds, is_better=decision["promote"])
        except PromotionError as error:
            failed = replace(grounds, sentence=f"Not promoted: {error.what}.")
            _conclude(home, tracker, version, failed, is_better=False)
            raise
        finally:
            refresh_cards(home, tracker, [version])
    return f"{name} version {version.version}: {text}"


def _conclude(home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, is_better: bool) -> str:
    if is_better:
        entry = champion.promote(home, tracker, version, grounds, actor=current_actor())
    else:
        entry = champion.refuse(home, tracker, version, grounds, actor=current_actor())
    if entry is not None:
        tell_act(home, PROMOTED if is_better else REFUSED, entry, grounds.sentence)
    return grounds.sentence


def apply_signature(home: Home, subject: str, *, decision: str, document: str, signature: str) -> str:
    """Apply a person's signed decision on a version such as ``tiny-grpo/4``; return a sentence.

    Raises:
        PromotionError: as for :func:`rlcore.tasks.promotion.approval.decide`.
    """
    tracker, (name, _, number) = open_tracker(home), subject.rpartition("/")
    with leased(home, name or subject):
        outcome = decide(home, subject, decision=decision, document=document, signature=signature)
        if version := registry.find_number(tracker, name, number):
            refresh_cards(home, tracker, [version])
    return outcome


def take_down(home: Home, name: str, *, version: int, reason: str) -> str:
    """Roll back the champion ``version`` of a registered model; return a sentence with the new champion.

    Raises:
        PromotionError: the version is not the champion, or there is no previous one.
    """
    tracker = open_tracker(home)
    with leased(home, name):
        again, entry = champion.roll_back(home, tracker, name, version=version, reason=reason, actor=current_actor())
        outcome = f"{name}: version {version} is rolled back, version {again.version} is champion again"
        tell_act(home, ROLLED_BACK, entry, f"{reason}; version {again.version} is champion again")
        if taken_down := registry.find_number(tracker, name, str(version)):
            refresh_cards(home, tracker, [taken_down])
    return outcome
