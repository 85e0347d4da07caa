"""Curves of a run in TensorBoard, Weights & Biases or trackio, beside any recorder.

    with closing(TensorBoard(Path("curves"), run="first")) as curves:
        rlcore.train(components, CurveRecorder(curves, LogRecorder(num_iterations)))

After a kill and a resume, each step is recorded once: steps that the tool already has are dropped. The steps after the
last checkpoint are computed again, so that none is lost. Metrics are recorded, but no rollouts.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rlcore.errors import ConfigError
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.loop.recorder import HealthStop, Recorder
from rlcore.types import ScoredRollout

_FLUSH_SECONDS = 30.0


class Curves(Protocol):
    """Metrics by step in a tool. ``resumed_at``: last step that an earlier process recorded, -1 if none did."""

    resumed_at: int

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record finite metrics of a step; steps never decrease."""

    def flush(self) -> None:
        """Make all records durable, as far as the tool allows."""

    def close(self) -> None: ...


def _import(package: str, module: str = "") -> Any:
    """Import a tool's module.

    Raises:
        ConfigError: its package is not installed.
    """
    try:
        return import_module(module or package)
    except ImportError as error:
        fix = f"pip install {package}"
        raise ConfigError(f"{package} is not installed: {error}", where="tracking.also", fix=fix) from error


class TensorBoard:
    """Event files in ``folder/project/run``, for ``tensorboard --logdir folder``; of ``config`` it keeps nothing."""

    def __init__(
        self, folder: Path, *, project: str = "rlcore", run: str = "run", config: Mapping[str, Any] | None = None
    ) -> None:
        events = _import("tensorboard", "tensorboard.backend.event_processing.event_accumulator")
        place = folder / project / run
        self.resumed_at = -1
        if place.is_dir():
            known = events.EventAccumulator(str(place), size_guidance={events.SCALARS: 0}).Reload()
            steps = [event.step for name in known.Tags()["scalars"] for event in known.Scalars(name)]
            self.resumed_at = max(steps, default=-1)
        self._writer = _import("tensorboard", "torch.utils.tensorboard").SummaryWriter(str(place))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with the id ``run``; ``WANDB_MODE=offline`` keeps it in ``folder``.

    A killed process loses what W&B had not written, so that ``folder`` has each point in a journal, from which the next
    process records the lost ones. Offline it records all of the killed process again, and renames that one's folder to
    ``replaced-…``, which ``wandb sync`` does not read.

    Raises:
        ConfigError: the package is not installed, or no account is logged in.
    """

    def __init__(
        self, folder: Path, *, project: str = "rlcore", run: str = "run", config: Mapping[str, Any] | None = None
    ) -> None:
        wandb = _import("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True)
        named = {"project": project, "name": run, "id": run, "resume": "allow", "dir": str(folder)}
        try:
            self._run = wandb.init(**named, config=dict(config or {}), settings=settings)
        except wandb.errors.Error as error:
            fix = "run wandb login, or set WANDB_MODE=offline"
            raise ConfigError(f"wandb: {error}", where="tracking.also", fix=fix) from error
        journal = folder / f"{project}-{run}.jsonl"
        entries = _read_journal(journal)
        self.resumed_at = max((entry["step"] for entry in entries if "step" in entry), default=-1)
        self._journal = journal.open("a", encoding="utf-8")
        self._journal.write("\n")  # after a line that a kill has cut
        self._note({"folder": str(Path(self._run.dir).parent)})
        for entry in self._lost(entries):
            self.write(entry["step"], entry["metrics"])

    def _lost(self, entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the points that W&B lacks; offline, set the killed process's folder aside."""
        if not self._run.offline:
            return [entry for entry in entries if entry.get("step", -1) >= self._run.starting_step]
        begins = [index for index, entry in enumerate(entries) if "folder" in entry]
        if not begins or "closed" in entries[-1]:
            return []
        killed = Path(entries[begins[-1]]["folder"])
        if killed.is_dir():
            killed.rename(killed.with_name(f"replaced-{killed.name}"))
        return [entry for entry in entries[begins[-1] :] if "step" in entry]

    def _note(self, entry: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics at the step."""
        self._note({"step": step, "metrics": dict(metrics)})
        self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Do nothing: the journal is written at once."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()
        self._note({"closed": True})
        self._journal.close()


def _read_journal(file: Path) -> list[Mapping[str, Any]]:
    """Return the entries of a journal, without a line that a kill has cut."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


class Trackio:
    """A local run of trackio, for ``trackio show``; its database is in ``TRACKIO_DIR``, and ``folder`` is not used."""

    def __init__(
        self, folder: Path, *, project: str = "rlcore", run: str = "run", config: Mapping[str, Any] | None = None
    ) -> None:
        trackio = _import("trackio")
        self._name = (project, run)
        self._steps = trackio.SQLiteStorage.get_max_step_for_run
        last = self._steps(*self._name)
        self.resumed_at = self._last = -1 if last is None else int(last)
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._finish = trackio.finish  # of the run itself, it would be called again at the end of the process
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(project, run, config=dict(config or {}), resume="allow", **options)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics at the step."""
        self._run.log(dict(metrics), step=step)
        self._last = step

    def flush(self) -> None:
        """Wait until trackio's thread has written the last step, at most half a minute."""
        end = time.monotonic() + _FLUSH_SECONDS
        while (self._steps(*self._name) or 0) < self._last and time.monotonic() < end:
            time.sleep(0.05)

    def close(self) -> None:
        """End the run."""
        with redirect_stdout(io.StringIO()):
            self._finish()


TOOLS: Mapping[str, type[TensorBoard | Wandb | Trackio]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
)
"""Each tool by the name of its package, which is also that of the extra."""


class Tools:
    """The tools of a stage. A step that an earlier attempt has recorded in one is dropped there."""

    def __init__(self, tools: Sequence[Curves]) -> None:
        self._tools, self._last = tuple(tools), 0

    def write(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Record numbers at a step; None: at the end of each tool's curves, as some want their steps in order."""
        self._last = max(self._last, step or 0)
        for each in self._tools:
            if step is None or step > each.resumed_at:
                each.write(max(self._last, each.resumed_at) if step is None else step, metrics)

    def flush(self) -> None:
        for each in self._tools:
            each.flush()


class CurveRecorder:
    """Recorder that writes metrics to ``curves`` and passes everything on to ``inner``."""

    def __init__(self, curves: Curves, inner: Recorder) -> None:
        self._curves, self._inner = curves, inner

    def log(self, text: str) -> None:
        """Pass the sentence on."""
        self._inner.log(text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics, unless an earlier process has."""
        self._inner.metrics(iteration, metrics)
        if iteration > self._curves.resumed_at:
            self._curves.write(iteration, metrics)

    def rollouts(self, iteration: int, sampled: SampledGroups[list[ScoredRollout]]) -> None:
        """Pass the rollouts on."""
        self._inner.rollouts(iteration, sampled)

    def stopped(self, stop: HealthStop) -> None:
        """Pass the stop on."""
        self._inner.stopped(stop)

    def flush(self) -> None:
        """Make the records of both durable."""
        self._inner.flush()
        self._curves.flush()
