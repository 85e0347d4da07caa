"""Several engines behind one sampler: prompts are dealt among them, weights go to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from rlcore.sampling.base import Sampler, SamplingParams, take_metrics
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server import open_alone
from rlcore.sampling.vllm.server_sync import WeightSync
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

# The largest of the replicas' values counts; of other metrics their sum.
_LARGEST = frozenset(("engine/kv_cache_usage", "engine/prefix_cache_hit_rate"))


class Send(Protocol):
    """Hands weights to every engine of a group."""

    def __call__(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None: ...


class ReplicatedSampler:
    """Engines that serve the same weights, which ``send`` gives them; see :class:`rlcore.sampling.base.Sampler`.

    A prompt's whole group goes to one engine, where it shares its prefill. Draws are decided by seed, place and sample
    number, so which engine makes a completion, and how many there are, changes none. A sync is proved on each of
    ``members``: what one of them answers says nothing of the others.
    """

    def __init__(self, members: Sequence[Sampler], send: Send) -> None:
        self.members, self._send = tuple(members), send
        self._threads = ThreadPoolExecutor(len(self.members), thread_name_prefix="replica")

    @property
    def policy_version(self) -> int:
        """The oldest version that one of them serves."""
        return min(member.policy_version for member in self.members)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """A group of completions per prompt, in the order of the prompts; each completion names its engine.

        Raises:
            SamplingError: one of the engines is broken.
        """
        numbers = list(range(len(prompts)) if places is None else places)
        count = len(self.members)

        def share(index: int) -> list[list[Rollout | FailedRollout]]:
            mine = slice(index, None, count)
            groups = self.members[index].sample(prompts[mine], params, seed=seed, places=numbers[mine])
            return [[_by(index, item) for item in group] for group in groups]

        shares = list(self._threads.map(share, range(count)))
        return [shares[number % count][number // count] for number in range(len(prompts))]

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Hand the weights to every engine.

        Raises:
            SamplingError: one refused them.
        """
        self._send(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """What the first engine says."""
        return self.members[0].logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """The parts in which any engine differs; None where one cannot say."""
        found = [member.differing_parts(state) for member in self.members]
        known = [parts for parts in found if parts is not None]
        return sorted({part for parts in known for part in parts}) if len(known) == len(found) else None

    def take_metrics(self) -> dict[str, float]:
        """How busy the servers were since the last call, all together."""
        total: dict[str, float] = {}
        for member in self.members:
            for name, value in take_metrics(member).items():
                before = total.get(name, 0.0)
                total[name] = max(before, value) if name in _LARGEST else before + value
        return total


def _by(replica: int, item: Rollout | FailedRollout) -> Rollout | FailedRollout:
    return replace(item, replica=replica) if isinstance(item, Rollout) else item


@contextmanager
def open_servers(
    specs: Sequence[ServerSpec], tokenizer: ChatTokenizer, progress: Callable[[str], None]
) -> Iterator[Sampler]:
    """One server, or several that start at the same time and share one folder of weights; all end on the way out.

    Raises:
        SamplingError: one does not start; the others are ended.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(specs)) as threads:
            # Each is on the stack as soon as it runs, so that those that started are ended when another does not.
            opened = threads.map(lambda spec: stack.enter_context(open_alone(spec, tokenizer, progress)), specs)
            samplers = list(opened)
        if len(samplers) == 1:
            samplers[0].sync.begin()
            yield samplers[0]
            return
        sync = WeightSync(samplers, specs[0])
        stack.callback(sync.close)
        sync.begin()
        yield ReplicatedSampler(samplers, sync.send)
