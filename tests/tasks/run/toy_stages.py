"""Small stages with a configuration of their own, and an open run of a pipeline that they run in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from rlcore.errors import TrainingError
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.presets.settings import BudgetConfig
from rlcore.tasks.run.budget import Meter
from rlcore.tasks.run.stages import PipelineRun
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker
from tests.toys import ToyConfig

calls: list[str] = []  # the functions that really ran; emptied before each test of this room


@dataclass(frozen=True, kw_only=True)
class Section:
    value: int = 1
    unrelated: int = 1


@dataclass(frozen=True, kw_only=True)
class ToyStages(ToyConfig):
    toy: Section = field(default_factory=Section)
    data: Section = field(default_factory=Section)
    sft: Section = field(default_factory=Section)
    rl: Section = field(default_factory=Section)


config = ToyStages.run


def open_run(home: Home) -> PipelineRun:
    tracker = open_tracker(home)
    return PipelineRun(
        home=home,
        store=ArtifactStore(home.root),
        cache=StageCache(home.cache),
        tracker=tracker,
        experiment="toy",
        parent=tracker.start_run("toy", "pipeline", tags={}),
        meter=Meter(home.root / "budgets" / "toy", BudgetConfig(), 0.0),
    )


def text(run: PipelineRun, ref: ArtifactRef, name: str = "number.txt") -> str:
    """The content of a file of an artifact."""
    return (run.store.path(ref) / name).read_text()


def toy_section(config: RunConfig) -> Sections:
    return Sections({"value": cast(ToyStages, config).toy.value})


def data_section(config: RunConfig) -> Sections:
    return sections_of(config, ("data",))


def sft_section(config: RunConfig) -> Sections:
    return sections_of(config, ("sft",))


def rl_section(config: RunConfig) -> Sections:
    return sections_of(config, ("rl",))


def make_number(context: StageContext) -> StageResult:
    calls.append("make")
    value = context.config.value
    (context.folder / "number.txt").write_text(str(value + context.seed))
    return StageResult(metrics={"value": value}, rows=1, contract="numbers/v1")


def double(context: StageContext) -> StageResult:
    calls.append("double")
    value = int((context.inputs["make"] / "number.txt").read_text())
    (context.folder / "number.txt").write_text(str(2 * value))
    context.log(f"{value} doubled")
    return StageResult(metrics={})


def fail_after_three_steps(context: StageContext) -> StageResult:
    """Fail after three steps of five; the next attempt resumes at step 2, as from a checkpoint."""
    begun = (context.work / "begun").exists()
    (context.work / "begun").touch()
    for step in range(2 if begun else 1, 6):
        calls.append(f"step {step}")
        context.tracker.log_metrics({"loss": 1.0 / step}, step=step)
        if step == 3 and not begun:
            (context.folder / "half").write_text("half")
            raise TrainingError("the machine burns")
    (context.folder / "result").write_text("whole")
    return StageResult(metrics={"loss": 0.2, "memory": 3.0})


def make_data(context: StageContext) -> StageResult:
    """A threshold: values 1 and 2 give the same bytes, so that a rerun may or may not change what comes after."""
    calls.append("data")
    value = context.config.data.value
    (context.folder / "rows").write_text("few" if value < 3 else "many")
    return StageResult(metrics={"data/accepted": value}, rows=value)


def train(context: StageContext) -> StageResult:
    calls.append("sft")
    rows = (context.inputs["data"] / "rows").read_text()
    (context.folder / "model").write_text(f"{rows} {context.config.sft.value}")
    return StageResult(metrics={"sft/loss": 0.5})


def reinforce(context: StageContext) -> StageResult:
    calls.append("rl")
    if context.config.rl.value < 0:
        raise ValueError("negative")
    (context.folder / "model").write_text((context.inputs["sft"] / "model").read_text() + " rl")
    return StageResult(metrics={"reward/mean": 1.0})


MAKE = Stage(name="make", artifact="number", run=make_number, sections=toy_section)
DOUBLE = Stage(name="double", artifact="number", run=double, sections=toy_section, inputs=("make",))
FAIL = Stage(name="fail", artifact="number", run=fail_after_three_steps, sections=lambda _: Sections({}))
DATA = Stage(name="data", artifact="dataset", run=make_data, sections=data_section)
SFT = Stage(name="sft", artifact="checkpoint", run=train, sections=sft_section, inputs=("data",))
RL = Stage(name="rl", artifact="policy", run=reinforce, sections=rl_section, inputs=("sft", "data"))
