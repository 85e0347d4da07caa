"""Stage kind ``win_rate``: answers of two policies, compared by a judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.config.answers import WinRateConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import (
    Lazy,
    Stage,
    StageKind,
    own_sections,
    stage_of_checkpoint,
    stage_of_start,
    stages_of_data,
)
from rlcore.tasks.presets.graph import ancestors, ref_policy_of, reward_models_of, rewards_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


@dataclass(frozen=True, kw_only=True)
class WinRateStage:
    """Preference for answers of one checkpoint over those of another on held-out prompts."""

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["win_rate"]  # this kind of stage
    policy: str  # checkpoint whose answers should win
    baseline: str  # checkpoint that it is compared with
    data: tuple[str, ...]  # datasets whose held-out prompts are answered
    # datasets of preference pairs whose held-out rows audit the judge; empty: no audit
    human_pairs: tuple[str, ...] = ()
    settings: WinRateConfig = field(metadata=INLINE)


DISJOINT = "train a judge on other pairs: half = 'first' of one stage and half = 'second' of the other divide a dataset"


def win_rate_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage in which a judge compares a checkpoint's answers with another's."""
    own = config.stage(name, WinRateStage)
    policy, reference = stage_of_start(name, own), stage_of_checkpoint(ref_policy_of(name, own))
    data = stages_of_data(config, dict.fromkeys((*own.data, *own.human_pairs)))
    rewards = rewards_behind(config, own)
    return Stage(
        name=name,
        artifact="win_rate",
        render_page=win_rate_page,
        run=partial(
            Lazy("rlcore.tasks.kinds.win_rate.step:run_win_rate"),
            policy=policy,
            reference=reference,
            rewards=rewards,
            shared=tuple(shared_pairs(config, own)),
        ),
        inputs=tuple(dict.fromkeys((policy, reference, *data, *reward_models_of(own), *rewards))),
        sections=own_sections(name, "confidence", "hardware", data=own.human_pairs),
        source_digest=external_digest,
    )


def rewards_behind(config: RunConfig, own: WinRateStage) -> tuple[str, ...]:
    """Return the stages of the reward models that the policy was trained by, if the judge is one too."""
    if own.settings.judge.kind != "reward_model" or own.policy not in config.stages:
        return ()
    trained = [name for name in config.stages if name in {own.policy, *ancestors(config, own.policy)}]
    terms = [term for name in trained for term in rewards_of(config.stages[name])]
    return tuple(dict.fromkeys(term.stage for term in terms if term.kind == "reward_model"))


def shared_pairs(config: RunConfig, own: WinRateStage) -> Iterator[str]:
    """Yield a reason for each reward model of the policy that is the judge, or shares training pairs with it."""
    name = own.settings.judge.stage
    for reward in rewards_behind(config, own):
        both = [each for each in map(config.stages.get, (name, reward)) if each and each.kind == "reward_model"]
        sources = [{_source(config, each) for each in one.data} for one in both]
        if name == reward:
            yield f"the judge {name} is the reward model that trained {own.policy}"
        elif set.intersection(*sources) and {one.half for one in both} != {"first", "second"}:
            yield f"the judge {name} is a twin of the reward model {reward}: they share training pairs"


def _source(config: RunConfig, name: str) -> tuple[str, str]:
    data = config.data.get(name)
    return (data.reader, data.path or name) if data else ("", name)


_AUDIT = {
    "agreement": "agreement with human labels",
    "order_dependent": "results that depend on the order",
    "length_bias": "preference for the longer answer beyond that of humans",
    "beyond_length": "agreement, less that of the rule that the longer answer is better",
}


def win_rate_page(result: Result, folder: Path) -> str:
    """Write ``win_rate.md``."""
    page = render(read_json(result.data / "win_rate.json"), confidence=result.confidence)
    (folder / "win_rate.md").write_text(page, encoding="utf-8")
    return page


def headline(summary: Mapping[str, Any]) -> str:
    """Summarize in one line: the win rate, and the reasons to distrust it."""
    rate = summary["found"]["rate"]
    text = f"win rate {_interval(rate)} of {summary['policy']} over {summary['reference']} on {rate['n']} prompts"
    doubts = f"; NOT TRUSTED: {'; '.join(summary['distrust'])}" if summary["distrust"] else ""
    return f"{text}, judged by {summary['judge']}{doubts}"


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    found, audit, unjudged = summary["found"], summary["audit"], summary["unjudged"]
    rows = {
        "win rate": found["rate"],
        "at equal length": found["length_controlled"],
        "results that depend on the order": found["order_dependent"],
    }
    lines = [plain(headline(summary)), "", f"| figure | {format_level(confidence)} interval |", "|---|---|"]
    lines += [f"| {label} | {_interval(interval)} |" for label, interval in rows.items()]
    lines += [
        "",
        f"{found['wins']} won, {found['ties']} tied ({summary['identical']} of them with identical answers), "
        f"{found['losses']} lost, {sum(unjudged.values())} unjudged. The first answer won {found['first']:.3f}.",
        "",
    ]
    lines += [f"Unjudged, {count} times: {plain(reason)}" for reason, count in unjudged.items()]
    lines += ["", f"Judge: {plain(summary['judge'])}.", ""]
    if audit:
        lines += [
            f"| on {audit['agreement']['n']} held-out human pairs | {format_level(confidence)} interval |",
            "|---|---|",
        ]
        lines += [f"| {label} | {_interval(audit[name])} |" for name, label in _AUDIT.items()]
        lines += [
            "",
            *(f"- {'passed' if check['passed'] else 'FAILED'}: {check['sentence']}" for check in audit["checks"]),
        ]
        lines += [
            f"- agreement with the reward model {plain(name)}: {_interval(each['agreement'])}; beyond independent "
            f"errors (0: independent, 1: equal): {_interval(each['excess'])}"
            for name, each in summary["dependence"].items()
        ]
        if audit["beyond_length"]["low"] <= 0:
            lines.append("- note: the judge is not shown to know more of these pairs than the lengths of the answers")
    cost = f", cost {summary['cost']:.4f}" if summary["cost"] else ""
    lines += [
        "",
        f"{summary['calls']} judge calls, {summary['failed_calls']} failed, {summary['tokens']} tokens{cost}.",
    ]
    return "\n".join(lines) + "\n"


def _interval(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


KIND = StageKind(stage=win_rate_stage)
