"""Observation of one side of a comparison: time, memory, and the work that was really done; equal work, or an error.

Nothing here comes from settings: token ids and advantages reach the trainer, updates, gradients and weights the
optimizer; precisions are of a layer's output.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.peers.work import Work

OTHERS = "products of other passes"
EXACT = ("sequences", "tokens", "trained tokens", "token ids", "updates", "weights", "products of updates", OTHERS)
ADVANTAGE = {"float32": 1e-3, "bfloat16": 1e-1}  # TRL adds 1e-4 to the standard deviation
GRADIENT = {"float32": 2e-3, "bfloat16": 5e-2}  # relative, of the norm over all parameters


class Record:
    """Record of a side; made before its model, so that memory is measured above the bare process."""

    def __init__(self, work: Work) -> None:
        self._work, self._bare, self._is_stopped = work, _peak_mib("cpu"), False
        self._sequences: list[tuple[tuple[int, ...], int, float]] = []
        self._gradients: list[list[float]] = []
        self._weights, self._products = set[torch.dtype](), defaultdict[str, set[torch.dtype]](set)
        self._parts, self._marks = defaultdict[str, float](float), list[float]()

    def see(self, token_ids: Sequence[int], *, trained: int, value: float) -> None:
        """Record a sequence that reaches the trainer, its trained tokens, and its advantage or side."""
        self._sequences.append((tuple(token_ids), trained, value))

    def watch(self, model: torch.nn.Module) -> None:
        layer = next(module for name, module in model.named_modules() if name.endswith("mlp.down_proj"))
        layer.register_forward_hook(self._forward)

    def start(self) -> None:
        """Start the clock, and observe every optimizer step; a second call does nothing."""
        if self._marks:
            return
        self._hook = register_optimizer_step_pre_hook(self._step)
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._marks.append(_now(self._work.device))

    def stop(self) -> None:
        """Stop both; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._peak = _peak_mib(self._work.device)
        self._hook.remove()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the work, which contains no other part."""
        start = time.process_time()
        yield
        self._parts[name] += time.process_time() - start

    def report(self) -> str:
        """Stop, and return timings and observed work as a line of JSON. CPU seconds are of all threads."""
        self.stop()
        rows = sorted(self._sequences)
        return json.dumps({
            "wall_seconds": self._wall,
            "cpu_seconds": self._cpu,
            **{f"{name}_cpu_seconds": seconds for name, seconds in self._parts.items()},
            "step_seconds": [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)],
            "peak_mib": self._peak - (self._bare if self._work.device == "cpu" else 0.0),
            "work": {
                "sequences": len(rows),
                "tokens": sum(len(ids) for ids, _, _ in rows),
                "trained tokens": sum(trained for _, trained, _ in rows),
                "token ids": hashlib.sha256(repr([row[:2] for row in rows]).encode()).hexdigest()[:16],
                "advantages": [value for _, _, value in rows],
                "updates": len(self._gradients),
                "gradients": self._gradients,
                "weights": _names(self._weights),
                "products of updates": _names(self._products["update"]),
                "products of other passes": _names(self._products["other"]),
            },
        })  # fmt: skip

    def _forward(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._products["update" if output.requires_grad else "other"].add(output.dtype)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._weights |= {each.dtype for each in parameters}
        self._gradients.append(sorted(float(each.grad.norm()) for each in parameters if each.grad is not None))
        self._marks.append(_now(self._work.device))


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class UnequalWorkError(Exception):
    """Two sides did different work; names the first differences."""


def require_same_work(first: Mapping[str, Any], second: Mapping[str, Any], *, names: tuple[str, str]) -> None:
    """Compare the observed work of two records.

    Raises:
        UnequalWorkError: Token ids, counts, advantages, updates, gradients or precisions differ.
    """
    found = differences(first, second)
    if found:
        lines = [f"{name}: {names[0]} {left}, {names[1]} {right}" for name, left, right in found]
        raise UnequalWorkError(f"{names[0]} and {names[1]} did different work, so no figure:\n  " + "\n  ".join(lines))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the name of each difference with both values."""
    # passes without gradient are those of generation; in other tasks a side may have none that is observed
    names = EXACT if first[OTHERS] and second[OTHERS] else [name for name in EXACT if name != OTHERS]
    found = [(name, first[name], second[name]) for name in names if first[name] != second[name]]
    if not found:
        advantage, gradient = (
            max(bounds[name] for name in first["products of updates"]) for bounds in (ADVANTAGE, GRADIENT)
        )
        found = _far("advantages", [first["advantages"]], [second["advantages"]], advantage)
        found += _far("gradients", first["gradients"], second["gradients"], gradient)
    return found


def _far(
    name: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], bound: float
) -> list[tuple[str, Any, Any]]:
    """Return the first vectors that differ by more than ``bound`` times their norm."""
    for left, right in zip(first, second, strict=True):
        if len(left) != len(right) or math.dist(left, right) > bound * math.hypot(*left):
            shown = f"{len(left)} numbers of norm {math.hypot(*left):.6g}"
            return [(name, shown, f"{len(right)} of {math.hypot(*right):.6g}")]
    return []
