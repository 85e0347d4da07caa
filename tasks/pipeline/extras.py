"""Whether what a stage needs beside the pipeline itself is installed, and is there: known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import BenchmarkStage


def extra_faults(config: RunConfig, stages: Iterable[str]) -> Iterator[str]:
    """What is missing, each with the key that needs it: the evaluation harness, and the files of its tasks."""
    for name in stages:
        stage = config.stages[name]
        if not isinstance(stage, BenchmarkStage):
            continue
        if find_spec("lm_eval") is None:
            yield f"stages.{name}: the evaluation harness is not installed: pip install 'rlcore[benchmarks]'"
        folder = Path(stage.settings.folder)
        for task in stage.settings.tasks:
            if not (folder / f"{task}.yaml").is_file():
                yield f"stages.{name}.tasks: there is no file {folder / f'{task}.yaml'}"
