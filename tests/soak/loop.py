"""A micro run of online RL, measured while it goes on: does anything grow with the number of iterations?"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import torch

from rlcore.config import (
    CheckpointConfig,
    HealthConfig,
    KlConfig,
    LimitConfig,
    ModelConfig,
    SamplingConfig,
    ShapeConfig,
)
from rlcore.loop import Components, Run, iterate
from rlcore.loop.native import chat_prompts, native_components
from rlcore.models.importing import import_model
from rlcore.rewards.user_function import function_reward
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.base import StageContext
from rlcore.tasks.steps.rl_recorder import StageRecorder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout
from tests import strategies

SHAPE = ShapeConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, max_positions=64)
QUESTIONS = {f"{a}+{b}": str(a + b) for a, b in [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]}
BETWEEN = 10  # iterations from one yardstick to the next
COUNTED = 8  # iterations before each mark whose calls are counted
NEVER = LimitConfig(patience=1_000_000)  # a run of noise collapses sooner or later, which is not what is asked here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Resources of a process after some iterations.

    ``seconds`` of the processor for each since the last mark; ``cost``: the same in times of :func:`yardstick`, which
    was measured in between. Other work on the machine slows both down, and neither of these: ``calls`` of functions
    by the main thread, and ``kilobytes`` that the process reads and writes, each for an iteration.
    """

    iteration: int
    seconds: float
    cost: float
    calls: float
    kilobytes: float
    resident_mib: float
    descriptors: int
    threads: int
    checkpoint_bytes: int
    state_bytes: int


def lengths(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    """A reward that noise earns too: the share of even tokens."""
    return [sum(token % 2 == 0 for token in r.completion_ids) / len(r.completion_ids) for r in rollouts]


def make_components(folder: Path, iterations: int, *, every: int) -> Components:
    """A run of a model of some 6,000 parameters with a KL penalty, and a checkpoint each ``every`` iterations."""
    start = folder / "start"
    if not start.exists():
        import_model(ModelConfig(source="scratch", shape=SHAPE), start, seed=0)
    config = strategies.rl_config(
        num_iterations=iterations,
        prompts_per_iteration=2,
        learning_rate=1e-5,
        kl=KlConfig(coefficient=0.05),
        sampling=SamplingConfig(max_new_tokens=6),
        checkpoints=CheckpointConfig(every_iterations=every),
    )
    prompts = chat_prompts(ChatTokenizer.load(start), QUESTIONS)
    components = native_components(
        start, config, prompts=prompts, reward=function_reward(lengths), folder=folder / "checkpoints"
    )
    limits: dict[str, Any] = dict.fromkeys(("kl", "clip", "entropy", "zero_signal", "length", "mismatch"), NEVER)
    return dataclasses.replace(components, health=HealthConfig(**limits))


@contextmanager
def recorded(folder: Path, iterations: int) -> Iterator[StageRecorder]:
    """The recorder of a stage, with a home and a run in MLflow of its own."""
    home = Home(folder / "home")
    home.root.mkdir(parents=True, exist_ok=True)
    with open_tracker(home).start_run("soak", "soak", tags={}) as tracker:
        yield StageRecorder(_context(folder, tracker), iterations)


def soak(run: Run, marks: int, say: Callable[[str], None] = print) -> list[Mark]:
    """Finish a run; what was measured at so many places on the way, equally far from each other."""
    total, found = run.components.config.num_iterations, list[Mark]()
    for number in range(marks):
        before, started, moved = run.iterations_done, time.process_time(), _moved()
        end, measured = total * (number + 1) // marks, list[float]()
        while run.iterations_done < end - COUNTED:
            iterate(run)
            if run.iterations_done % BETWEEN == 0:
                measured.append(yardstick())
        spent = time.process_time() - started - sum(measured)
        each = spent / max(1, run.iterations_done - before)
        calls = _calls(lambda: iterate(run), end - run.iterations_done)
        run.recorder.flush()
        run.components.learner.wait()
        kilobytes = (_moved() - moved) / 1000.0 / (run.iterations_done - before)
        cost = each / float(np.mean(measured)) if measured else 0.0
        found.append(_mark(run, seconds=each, cost=cost, calls=calls, kilobytes=kilobytes))
        say(str(found[-1]))
    return found


def _calls(work: Callable[[], object], times: int) -> float:
    """Return the number of functions are called by each of so many turns of ``work``, in this thread."""
    count = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for _ in range(times):
            work()
    finally:
        sys.setprofile(None)
    return count / max(1, times)


def _moved() -> int:
    """Bytes that this process has read and written until now, whether or not a disk was reached."""
    counters = psutil.Process().io_counters()
    return int(counters.read_chars + counters.write_chars)


def yardstick() -> float:
    """Processor seconds of a piece of work that is always the same: a millisecond or so of what an iteration does."""
    started = time.process_time()
    json.loads(json.dumps(list(range(2000))))
    square = torch.ones(64, 64)
    for _ in range(30):
        square = torch.tanh(square @ square / 64)
    return time.process_time() - started


def warm(marks: Sequence[Mark]) -> Sequence[Mark]:
    """The marks after the first quarter of a run: until then the audit's window of 64 looks fills up."""
    return marks[max(1, len(marks) // 4) :]


def slope(marks: Sequence[Mark], name: str) -> tuple[float, float]:
    """Growth of a figure in 1,000 iterations by least squares, with its standard error, from :func:`warm` on."""
    kept = warm(marks)
    x = np.array([mark.iteration for mark in kept]) / 1000.0
    y = np.array([float(getattr(mark, name)) for mark in kept])
    x = x - x.mean()
    each = float((x * y).sum() / (x**2).sum())
    left = y - y.mean() - each * x
    return each, float(np.sqrt((left**2).sum() / max(1, len(x) - 2) / (x**2).sum()))


def _mark(run: Run, **measured: float) -> Mark:
    process = psutil.Process(os.getpid())
    newest = max(run.components.folder.glob("step-*"))
    return Mark(
        iteration=run.iterations_done,
        **measured,
        resident_mib=process.memory_info().rss / 2**20,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        checkpoint_bytes=sum(path.stat().st_size for path in newest.iterdir()),
        state_bytes=(newest / "state.json").stat().st_size,
    )


def _context(folder: Path, tracker: Any) -> StageContext:
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    nothing: Mapping[str, Any] = {}
    return StageContext(
        stage="grpo",
        folder=folder / "artifact",
        work=work,
        inputs={},
        input_refs={},
        config=Sections(nothing),
        seed=0,
        stage_key="soak",
        checkpoint_key="soak",
        tracker=tracker,
        log=lambda text: None,
        report_progress=lambda label, done, total, metrics=None: None,
        run_task=lambda name, number, job: job(),
    )
