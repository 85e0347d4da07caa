"""vLLM in one process with the trainer: run in an environment that holds both, prints what it found as JSON.

python in_process_run.py CHECKPOINT
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.checks.canaries import EngineCalibration, ExpectedWeights, sample_probes, sync_canary, token_scores
from rlcore.checks.canaries.agreement import Spread
from rlcore.config import EngineConfig
from rlcore.errors import RlcoreError
from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.client import ControlGroup, EngineControl
from rlcore.sampling.vllm.in_process import InProcessSampler, open_in_process
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.transfer import (
    BuiltInTransfer,
    ControlClient,
    WeightSource,
    init_info,
    open_builtin,
    world_sizes,
)
from rlcore.sampling.vllm.weights import Weights
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Message, Prompt, Rollout

CPU = torch.device("cpu")
ALONE: dict[str, Any] = {"sleeps": False, "free": lambda: None, "progress": lambda line: None}
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24, num_samples=3)


class Run:
    """The engine, the trainer's model, and the prompts."""

    def __init__(self, engine: InProcessSampler, model: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
        self.engine, self.model, self.tokenizer = engine, model, tokenizer
        conversations = [(Message(role="user", content=text),) for text in ("3+4", "12+30-7", "1", "8-2+5-1+6")]
        self.prompts = [
            Prompt(prompt_id=str(n), messages=turns, token_ids=tokenizer.render_prompt(turns), reference="", task="t")
            for n, turns in enumerate(conversations)
        ]

    @property
    def native(self) -> NativeSampler:
        """The built-in engine on the model as it is now."""
        return NativeSampler(self.model, self.tokenizer)

    def rollouts(self, seed: int) -> list[Rollout]:
        groups = self.engine.sample(self.prompts, PARAMS, seed=seed)
        return [item for group in groups for item in group if isinstance(item, Rollout)]

    def worst_difference(self, seed: int) -> float:
        """Return the largest difference of the engine's reported log-probabilities from the trainer's."""
        native = self.native
        return max(
            abs(a - b)
            for rollout in self.rollouts(seed)
            for a, b in zip(
                rollout.sampler_logprobs,
                native.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=0.8),
                strict=True,
            )
        )

    def sync(self, size: float = 0.03) -> float:
        """Weights moved, loaded and proved; returns the seconds of the loading."""
        version = self.engine.policy_version + 1
        draws = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += size * torch.randn(parameter.shape, generator=draws)
        started = time.perf_counter()
        self.engine.load_weights(self.model.state_dict(), policy_version=version)
        seconds = time.perf_counter() - started
        score = partial(token_scores, self.model, temperature=0.8, tokens_per_microbatch=4096)
        state = self.model.state_dict()
        truth = ExpectedWeights(state=state, policy_version=version, score=score, temperature=0.8, dtype=torch.float32)
        probes = sample_probes(self.engine, self.prompts, PARAMS, seed=version)
        sync_canary(self.engine, probes, truth, EngineCalibration(noise=Spread(0.0, 0.0), unverified=frozenset()))
        return seconds

    def with_worker(self, faults: dict[str, Callable[..., Any]]) -> str:
        """The error of a sync with a worker that loses weights, empty where there is none; it is mended afterwards."""
        from rlcore.sampling.vllm.worker import receiver

        whole = {name: getattr(receiver, name) for name in faults}
        for name, fault in faults.items():
            setattr(receiver, name, fault)
        try:
            self.sync()
            return ""
        except RlcoreError as error:
            return type(error).__name__
        finally:
            for name, function in whole.items():
                setattr(receiver, name, function)


def nothing(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(())


def most(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in weights if name != "model.layers.1.mlp.down_proj.weight")


def process_state() -> tuple[object, ...]:
    return (torch.set_num_threads, torch.get_num_threads(), random.getstate(), torch.get_rng_state().sum().item())


def findings(run: Run) -> dict[str, Any]:
    together = run.rollouts(7)
    alone = [run.engine.sample([p], PARAMS, seed=7, places=[n])[0] for n, p in enumerate(run.prompts)]
    long = Prompt(prompt_id="long", messages=(), token_ids=(5,) * 250, reference="", task="t")
    mixed = run.engine.sample([long, run.prompts[0]], PARAMS, seed=0)
    found: dict[str, Any] = {
        "before": run.worst_difference(1),
        "draws_of_the_batch": [r.completion_ids for r in together]
        == [r.completion_ids for group in alone for r in group if isinstance(r, Rollout)],
        "distinct": len({r.completion_ids for r in together}) == len(together),
        "first_completion": list(together[0].completion_ids),
        "long_fails_alone": [[isinstance(item, FailedRollout) for item in group] for group in mixed],
    }
    found["sync_seconds"] = [run.sync() for _ in range(3)]
    found["after_three_syncs"] = run.worst_difference(2)
    found["versions"] = sorted({r.policy_version for r in run.rollouts(2)})
    found["stale"] = run.with_worker({"chosen": nothing})
    found["partial"] = run.with_worker({"chosen": most})
    found["head"] = run.with_worker({"repack_head": lambda model: None})
    run.sync()
    found["after_the_faults"] = run.worst_difference(3)
    try:
        run.engine.load_weights({}, policy_version=99)
    except RlcoreError as error:
        found["refused"] = error.args[0]
    found["version_after_refusal"] = run.engine.policy_version
    return found


def builtin_senders(checkpoint: Path) -> dict[str, Any]:
    """vLLM's senders between GPUs as far as they go without one: what they are told, what they tell the server."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    asked: list[tuple[str, Any]] = []

    class Server(EngineControl):
        def ask(self, path: str, payload: Any, *, seconds: float = 0.0) -> Any:
            asked.append((path, payload))
            return {"world_size": 3}

    group = ControlGroup([Server(("127.0.0.1", 1), log_tail=str)])
    sizes = world_sizes(group)
    nccl, ipc = (init_info(kind, "127.0.0.1", sizes) for kind in ("nccl", "ipc"))
    worker = {"master_address": nccl.master_address, "master_port": nccl.master_port, "world_size": nccl.world_size}
    NCCLWeightTransferInitInfo(**worker, rank_offset=1)  # both check what they are given
    IPCWeightTransferInitInfo(packed=ipc.packed)
    source, sent = WeightSource(CPU), []
    sender = NCCLTrainerWeightTransferEngine(client=ControlClient(group, sizes), source=source)
    # In the place of the broadcast, which needs a GPU: vLLM's own check of what is sent against what was announced.
    sender._broadcast = lambda source, meta: sent.extend(name for name, _ in sender._checked_iter(source, meta))
    BuiltInTransfer(sender, source).send(Weights(path=checkpoint))
    told = dict(asked)["/update_weights"]["update_info"]
    NCCLWeightTransferUpdateInfo(**told)
    try:
        open_builtin("ipc", group, host="127.0.0.1", sizes=sizes)
        refused = ""
    except (AssertionError, RuntimeError) as error:
        refused = type(error).__name__
    return {
        "routes": [path for path, _ in asked],
        "world_size": nccl.world_size,
        "announced": told["names"],
        "sent": sent,
        "first": [told["dtype_names"][0], told["shapes"][0]],
        "ipc_without_a_gpu": refused,
    }


def main(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    before = process_state()
    tokenizer = ChatTokenizer.load(checkpoint)
    spec = ServerSpec(
        model=checkpoint,
        weight_dir=Path(),
        config=EngineConfig(kind="vllm_inprocess", kv_cache_gib=0.25),
        dtype="float32",
        max_model_len=256,
        max_concurrent=16,
    )
    started = time.perf_counter()
    with open_in_process(spec, tokenizer, **ALONE) as engine:
        start_seconds = time.perf_counter() - started
        kept = process_state() == before
        found = findings(Run(engine, load_policy(checkpoint, device=CPU, dtype=torch.float32), tokenizer))
    with open_in_process(spec, tokenizer, **ALONE) as engine:  # the next stage of the same process
        again = Run(engine, load_policy(checkpoint, device=CPU, dtype=torch.float32), tokenizer)
        found["second_start"] = again.worst_difference(1)
    found["builtin"] = builtin_senders(checkpoint)
    sys.stdout.write("FOUND " + json.dumps(found | {"process_kept": kept, "start_seconds": start_seconds}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
