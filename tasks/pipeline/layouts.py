"""Division of GPUs into learners and samplers, and iteration times computed from shapes and data sheets.

    update    6 P FLOP a token and epoch (8 with recomputed layers), 2 P for each forward pass before it; or the traffic
              of the shards, if that takes longer: each micro-batch gathers all weights twice and sums the gradients.
              Offloaded shards cross to the GPU and back, and the CPU takes the optimizer step
    rollouts  every decoding step reads the weights and the keys and values of all sequences; or the longest completion
              by itself, if that takes longer
    sync      shards are gathered, and sent in half precision by one GPU

P: parameters. ``EFFICIENCY`` is the fraction of data-sheet rates that a GPU reaches. Nothing here is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlcore.config import RlConfig
from rlcore.errors import ConfigError
from rlcore.hardware.memory_plan import ModelSize, format_bytes, rl_footprint
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import data_of, rl_of
from rlcore.tasks.steps.algorithm_facts import uses_critic

_GIB, _NODE = 2**30, 8  # GPUs of one machine, which are joined by the fast link
_HALF, _SINGLE = 2, 4  # bytes
_STEP, _MACHINE = 28, 2e11  # of Adam, bytes read and written per parameter; of host memory, bytes per second
_RESERVE = 4 * _GIB  # per GPU, for CUDA, its libraries and fragmentation
_TYPICAL = 0.4  # mean length of a completion as a fraction of the longest
_LAYER_SECONDS, _MEETING_SECONDS = 2e-5, 1.5e-5  # in a decoding step: of a layer's kernels, of an all-reduce
_LOADED = 0.85  # of a GPU that an engine fills


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Data sheet of a GPU: bytes of memory, dense FLOP/s in half precision, and bandwidths in bytes per second.

    Bandwidths, each in one direction: of its memory, its link within a machine, its link to host memory, and
    its part of the network between machines.
    """

    memory: float
    flops: float
    bandwidth: float
    link: float
    host: float
    network: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100": Gpu(memory=80e9, flops=312e12, bandwidth=2.0e12, link=300e9, host=32e9, network=25e9),
        "h100": Gpu(memory=80e9, flops=989e12, bandwidth=3.35e12, link=450e9, host=64e9, network=50e9),
        "h200": Gpu(memory=141e9, flops=989e12, bandwidth=4.8e12, link=450e9, host=64e9, network=50e9),
        "l40s": Gpu(memory=48e9, flops=362e12, bandwidth=0.86e12, link=32e9, host=32e9, network=12.5e9),
    }
)
EFFICIENCY = MappingProxyType({"update": 0.4, "pass": 0.5, "decoding": 0.6, "traffic": 0.7})
"""Assumed fraction of the data-sheet rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationShape:
    """Work of one iteration. ``prompt_tokens``: of the longest prompt; ``offload``: shards are in host memory."""

    size: ModelSize
    rl: RlConfig
    prompt_tokens: int
    recompute: bool
    offload: bool = False

    @property
    def sequences(self) -> int:
        """Completions of an iteration."""
        return self.rl.prompts_per_iteration * self.rl.group_size

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a completion."""
        return _TYPICAL * self.rl.sampling.max_new_tokens

    @property
    def trained_tokens(self) -> float:
        """Tokens of an iteration's trees: each prompt once, with its group's completions."""
        return self.rl.prompts_per_iteration * self.prompt_tokens + self.sequences * self.mean_tokens

    def is_whole(self, ranks: int) -> bool:
        """Return True if each GPU has all weights; the base of a LoRA is whole everywhere."""
        return self.rl.update.lora.rank > 0 or (ranks == 1 and not self.offload)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Layout: ``ranks`` GPUs learn, ``engines`` servers sample on ``width`` GPUs each; ``shared``: in turn on the same.

    ``held``: bytes on a learner's GPU. The other fields are seconds of an iteration's parts.
    """

    ranks: int
    engines: int
    width: int
    shared: bool
    held: float
    update: float
    rollouts: float
    sync: float

    def seconds(self, staleness: int) -> float:
        """Return the duration of an iteration: the sum of its parts, or the longer one if rollouts are prefetched."""
        apart = self.shared or not staleness
        return self.sync + (self.update + self.rollouts if apart else max(self.update, self.rollouts))


def layout_lines(config: RunConfig, size: ModelSize | None, name: str, count: int) -> list[str]:
    """Return a line for each RL stage of a preset whose model is available.

    Raises:
        ConfigError: the GPU is unknown.
    """
    if size is None:
        return []
    recompute = config.hardware.gradient_checkpointing
    lines = []
    for stage, each in config.stages.items():
        if rl := rl_of(each):
            longest = max(config.data[data].max_tokens for data in data_of(each))
            offload = config.distributed.cpu_offload
            work = IterationShape(size=size, rl=rl, prompt_tokens=longest, recompute=recompute, offload=offload)
            lines.append(f"layout of {stage}, by arithmetic: {layout_line(work, name, count)}")
    return lines


def layout_line(work: IterationShape, name: str, count: int) -> str:
    """Describe the best use of ``count`` GPUs and its iteration time, or the reason why the run does not fit.

    Raises:
        ConfigError: the GPU is unknown.
    """
    if name not in GPUS:
        raise ConfigError(f"no figures of a GPU {name!r}", where="--gpu-type", fix=f"name one of {', '.join(GPUS)}")
    found = best_layout(work, GPUS[name], count)
    if isinstance(found, str):
        return f"{count} {name}: does not fit: {found}"
    engines = f"{found.engines} engine{'s' * (found.engines > 1)} of {found.width}"
    dealt = f"learner and {engines} in turn" if found.shared else f"{found.ranks} learn, {engines} sample"
    synchronous, ahead = found.seconds(0), found.seconds(1)
    faster = f", {ahead:.3g} s with sampling.staleness = 1" if ahead < synchronous else ""
    return (
        f"{count} {name}: {dealt}; a learner GPU needs {format_bytes(int(found.held))} of "
        f"{format_bytes(int(GPUS[name].memory))}; an iteration takes {synchronous:.3g} s (update {found.update:.3g}, "
        f"rollouts {found.rollouts:.3g}, sync {found.sync:.3g}){faster}"
    )


def best_layout(work: IterationShape, gpu: Gpu, count: int) -> Layout | str:
    """Return the layout of ``count`` GPUs with the shortest iteration at the run's staleness, or why there is none."""
    least = engine_width(work, gpu)
    if least > count:
        return (
            f"an engine needs {least} of them for the weights alone, {format_bytes(_HALF * work.size.num_parameters)}"
        )
    found = [each for each in _layouts(work, gpu, count, least) if each.held <= gpu.memory]
    if not found:
        each = format_bytes(int(rank_bytes(work, count)))
        return f"if all of them learn, each needs {each} of {format_bytes(int(gpu.memory))}, without the engine"
    return min(found, key=lambda each: each.seconds(work.rl.sampling.staleness))


def _layouts(work: IterationShape, gpu: Gpu, count: int, least: int) -> Iterator[Layout]:
    """Yield learner and engine in turn on one GPU, and divisions of several into whole and half machines."""
    if count == 1:
        held = rank_bytes(work, 1) + _engine_bytes(work, 1)
        rollouts = rollout_seconds(work, gpu, 1, 1, free=max(0.0, gpu.memory - held))
        yield _layout(work, gpu, 1, 1, held=held, rollouts=rollouts, engines=1, shared=True)
    widths = [1 << power for power in range(_NODE.bit_length()) if least <= 1 << power <= max(least, _NODE)]
    several = () if work.rl.update.lora.rank else (2, 4, *range(_NODE, count, _NODE))  # ranks merge LoRA: refused
    for ranks in (1, *several):
        for width in widths:
            if engines := max(0, count - ranks) // width:
                held, rollouts = rank_bytes(work, ranks), rollout_seconds(work, gpu, engines, width)
                yield _layout(work, gpu, ranks, width, held=held, rollouts=rollouts, engines=engines)


def _layout(
    work: IterationShape,
    gpu: Gpu,
    ranks: int,
    width: int,
    *,
    held: float,
    rollouts: float,
    engines: int,
    shared: bool = False,
) -> Layout:
    return Layout(
        ranks=ranks,
        engines=engines,
        width=width,
        shared=shared,
        held=held,
        update=update_seconds(work, gpu, ranks),
        rollouts=rollouts,
        sync=sync_seconds(work, gpu, ranks),
    )


def engine_width(work: IterationShape, gpu: Gpu) -> int:
    """Return the GPUs of one engine: a power of two whose memory has room for the weights and as much cache."""
    return 1 << max(0, math.ceil(math.log2(2 * _engine_bytes(work, 1) / (_LOADED * gpu.memory))))


def rank_bytes(work: IterationShape, ranks: int) -> float:
    """Return the bytes on a learner's GPU: its part of the shards, activations, and gathered weights."""
    rl, size = work.rl, work.size
    models = [term for term in rl.rewards if term.kind == "reward_model"]
    footprint = rl_footprint(
        size,
        rl,
        uses_critic=uses_critic(rl),
        reward_model=None,
        compute_bytes=_HALF,
        gradient_checkpointing=work.recompute,
        num_tokens=work.prompt_tokens + rl.sampling.max_new_tokens,
    )
    native = rl.sampling.engine is None or rl.sampling.engine.kind == "native"
    copies = _HALF * size.num_parameters * (len(models) - native)  # an engine is counted if it is on this GPU
    fixed = footprint.weights + footprint.gradients + footprint.optimizer + copies
    if work.is_whole(ranks):
        return fixed + footprint.activations + _RESERVE
    of_layers = sum(inputs * outputs for _, inputs, outputs in size.linear)
    gathered = _SINGLE * (2 * of_layers // size.num_layers + size.num_parameters - of_layers)
    return (0 if work.offload else fixed / ranks) + footprint.activations + gathered + _RESERVE


def update_seconds(work: IterationShape, gpu: Gpu, ranks: int) -> float:
    """Return the time of the forward passes before the update and of its epochs."""
    rl, parameters = work.rl, work.size.num_parameters
    steps = rl.update.num_epochs * rl.update.num_minibatches
    passes = (steps > 1) + (rl.kl.coefficient > 0.0) + sum(term.kind == "reward_model" for term in rl.rewards)
    critics = 1 if uses_critic(rl) and rl.critic.architecture == "separate" else 0
    learning = (8 if work.recompute else 6) * rl.update.num_epochs * (1 + critics) / EFFICIENCY["update"]
    looking = 2 * (passes + critics) / EFFICIENCY["pass"]
    flops = parameters * work.trained_tokens * (learning + looking)
    per_rank = work.trained_tokens / ranks / rl.update.tokens_per_microbatch
    batches = rl.update.num_epochs * max(rl.update.num_minibatches, math.ceil(per_rank)) * (1 + critics)
    if work.is_whole(ranks):
        return flops / ranks / gpu.flops
    traffic = (3 * batches + passes + critics) * _SINGLE * parameters
    products = max(flops / ranks / gpu.flops, 0.0 if ranks == 1 else traffic / _link(gpu, ranks))
    if not work.offload:
        return products
    stepping = steps * (1 + critics) * _STEP * parameters / math.ceil(ranks / _NODE) / _MACHINE
    return max(products, traffic / ranks / (EFFICIENCY["traffic"] * gpu.host)) + stepping


def rollout_seconds(work: IterationShape, gpu: Gpu, engines: int, width: int, *, free: float | None = None) -> float:
    """Return the time of prefill and decoding; ``free``: bytes for keys and values of an engine."""
    size, rl = work.size, work.rl
    mine = math.ceil(work.sequences / engines)
    each = 2 * size.num_layers * size.keys * _HALF * (work.prompt_tokens + rl.sampling.max_new_tokens)
    room = free if free is not None else _LOADED * width * gpu.memory - _engine_bytes(work, 1)
    together = max(1, min(mine, math.ceil(rl.sampling.max_concurrent / engines), int(room / each)))

    def step(count: float) -> float:
        read = _HALF * size.num_parameters + 0.5 * each * count
        compute = 2 * size.num_parameters * count / (width * gpu.flops * EFFICIENCY["pass"])
        waits = size.num_layers * (_LAYER_SECONDS + (2 * _MEETING_SECONDS if width > 1 else 0.0))
        return waits + max(read / (width * gpu.bandwidth * EFFICIENCY["decoding"]), compute)

    prefill = 2 * size.num_parameters * work.prompt_tokens * rl.prompts_per_iteration / engines
    decoding = mine * work.mean_tokens / together * step(together)
    longest = rl.sampling.max_new_tokens * step(0.25 * together)  # few sequences are left by then
    return prefill / (width * gpu.flops * EFFICIENCY["pass"]) + max(decoding, longest)


def sync_seconds(work: IterationShape, gpu: Gpu, ranks: int) -> float:
    """Return the time of sending the shards to all engines, which receive in parallel."""
    parameters = work.size.num_parameters
    gathered = 0.0 if ranks == 1 else _SINGLE * parameters / _link(gpu, ranks)
    return gathered + _HALF * parameters / (EFFICIENCY["traffic"] * gpu.network)


def _engine_bytes(work: IterationShape, width: int) -> float:
    return _HALF * work.size.num_parameters / width


def _link(gpu: Gpu, ranks: int) -> float:
    """Return the bytes per second that each rank receives: between machines, through the links of all their GPUs."""
    return EFFICIENCY["traffic"] * (gpu.link if ranks <= _NODE else min(gpu.link, _NODE * gpu.network))
