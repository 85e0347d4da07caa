"""Stage kind ``benchmark``."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.benchmark.settings import BenchmarkStage
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint
from rlcore.tasks.presets.graph import start_of
from rlcore.tasks.presets.run import RunConfig


def benchmark_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that runs a benchmark's tasks on a checkpoint."""
    own = config.stage(name, BenchmarkStage)
    policy = stage_of_checkpoint(start_of(name, own))
    return Stage(
        name=name,
        version=1,
        kind="benchmark",
        render_page=Lazy("rlcore.tasks.kinds.benchmark.page:benchmark_page"),
        run=partial(Lazy("rlcore.tasks.kinds.benchmark.step:run_benchmark"), policy=policy),
        inputs=(policy,),
        sections=own_sections(name, "confidence", "hardware"),
        source_digest=Lazy("rlcore.tasks.kinds.benchmark.step:task_files"),
    )


KIND = StageKind(stage=benchmark_stage, checks="rlcore.tasks.kinds.benchmark.checks:errors")
