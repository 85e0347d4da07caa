"""Several engines behind one sampler: prompts are distributed among them, weights go to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from rlcore.sampling.base import Sampler, SamplingParams, take_metrics
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server import open_alone
from rlcore.sampling.vllm.server_sync import WeightSync
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

_LARGEST = frozenset(("engine/kv_cache_usage", "engine/prefix_cache_hit_rate"))  # others are summed over replicas


class ReplicatedSampler:
    """Engines with equal weights, which ``send`` updates; see :class:`rlcore.sampling.base.Sampler`.

    A prompt's group goes to one engine; samples do not depend on their number.
    """

    def __init__(self, members: Sequence[Sampler], send: Callable[..., None]) -> None:
        self.members, self._send = tuple(members), send
        self._threads = ThreadPoolExecutor(len(self.members), thread_name_prefix="replica")

    @property
    def policy_version(self) -> int:
        """Oldest version that a member serves."""
        return min(member.policy_version for member in self.members)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of completions per prompt, each with the number of its engine.

        Raises:
            SamplingError: An engine is broken.
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
        """Send the weights to every engine."""
        self._send(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probabilities of the first engine."""
        return self.members[0].logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        """Return the parts in which any engine differs; None if an engine cannot be compared."""
        found = [member.differing_parts(state) for member in self.members]
        known = [parts for parts in found if parts is not None]
        return sorted({part for parts in known for part in parts}) if len(known) == len(found) else None

    def take_metrics(self) -> dict[str, float]:
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
    """Start one server, or several concurrently with one weight folder. All are stopped on exit.

    Raises:
        SamplingError: A server does not start; the others are stopped.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(specs)) as threads:
            # Each server enters the stack once it runs, so that it is stopped if another fails to start.
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
