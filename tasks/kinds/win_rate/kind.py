"""Stage kind ``win_rate``: answers of two policies, compared by a judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.answers import WinRateConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint, stages_of_data
from rlcore.tasks.kinds.reward_model.kind import RewardModelStage
from rlcore.tasks.presets.graph import ancestors, ref_policy_of, reward_models_of, rewards_of, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest


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
    policy, reference = (stage_of_checkpoint(each) for each in (start_of(name, own), ref_policy_of(name, own)))
    data = stages_of_data(config, dict.fromkeys((*own.data, *own.human_pairs)))
    rewards = rewards_behind(config, own)
    return Stage(
        name=name,
        version=1,
        kind="win_rate",
        render_page=Lazy("rlcore.tasks.kinds.win_rate.page:win_rate_page"),
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
        both = [each for each in map(config.stages.get, (name, reward)) if isinstance(each, RewardModelStage)]
        sources = [{_source(config, each) for each in one.data} for one in both]
        if name == reward:
            yield f"the judge {name} is the reward model that trained {own.policy}"
        elif set.intersection(*sources) and {one.half for one in both} != {"first", "second"}:
            yield f"the judge {name} is a twin of the reward model {reward}: they share training pairs"


def _source(config: RunConfig, name: str) -> tuple[str, str]:
    data = config.data.get(name)
    return (data.reader, data.path or name) if data else ("", name)


KIND = StageKind(stage=win_rate_stage)
