"""Stage kind ``benchmark``: tasks of the language model evaluation harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.config.answers import BenchmarkConfig
from rlcore.extras import install_command
from rlcore.strict_config import INLINE
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_start
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


@dataclass(frozen=True, kw_only=True)
class BenchmarkStage:
    """Tasks of the language model evaluation harness, run on ``policy``. The stage reads no dataset of the preset."""

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = ""
    is_compared: ClassVar[bool] = True
    kind: Literal["benchmark"]  # this kind of stage
    policy: str  # checkpoint that is measured
    settings: BenchmarkConfig = field(metadata=INLINE)


def benchmark_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that runs a benchmark's tasks on a checkpoint."""
    own = config.stage(name, BenchmarkStage)
    policy = stage_of_start(name, own)
    return Stage(
        name=name,
        artifact="benchmark",
        render_page=benchmark_page,
        run=partial(Lazy("rlcore.tasks.kinds.benchmark.step:run_benchmark"), policy=policy),
        inputs=(policy,),
        sections=own_sections(name, "confidence", "hardware"),
        source_digest=Lazy("rlcore.tasks.kinds.benchmark.step:task_files"),
    )


def errors(key: str, stage: BenchmarkStage) -> Iterator[str]:
    """Yield what is missing for the stage of the key ``stages.NAME``: the evaluation harness, files of its tasks."""
    if find_spec("lm_eval") is None:
        yield f"{key}: the evaluation harness is not installed: {install_command('benchmarks')}"
    folder = Path(stage.settings.folder)
    for task in stage.settings.tasks:
        if not (folder / f"{task}.yaml").is_file():
            yield f"{key}.tasks: there is no file {folder / f'{task}.yaml'}"


def benchmark_page(result: Result, folder: Path) -> str:
    """Write ``benchmark.md``."""
    page = render(read_json(result.data / "benchmark.json"), confidence=result.confidence)
    (folder / "benchmark.md").write_text(page, encoding="utf-8")
    return page


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    lines = [
        f"Tasks of {plain(summary['policy'])}.",
        "",
        f"| task | metric | documents | mean | {format_level(confidence)} interval |",
        "|---|---|---|---|---|",
        *(
            f"| {plain(each['task'])} | {plain(each['metric'])} | {each['n']} | {each['mean']:.3f} "
            f"| [{each['low']:.3f}, {each['high']:.3f}] |"
            for each in summary["tasks"]
        ),
    ]
    return "\n".join(lines) + "\n"


KIND = StageKind(stage=benchmark_stage, checks=errors)
