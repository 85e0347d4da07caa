"""Episodes that programs of the user play: one process per episode, whose model calls the gateway answers.

Results are not reproducible bit for bit: how many requests share an engine call depends on the speed of the processes,
and with it the last digits of the log-probabilities. A repeated iteration has other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from rlcore.agents.gateway import Gateway
from rlcore.agents.program import Agents, Ended, Program, open_program
from rlcore.agents.session import Limits, Record
from rlcore.config import AgentConfig
from rlcore.errors import SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

MAX_FAILURES = 0.1  # of the episodes of a batch, and one of any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """Episode of an agent: its process and the record of its calls, which has no rollout if no call was answered."""

    prompt: Prompt
    ended: Ended
    record: Record

    @property
    def failure(self) -> str:
        """Reason of the failure, or "". An agent that breaks because a limit refused its call is truncated."""
        if self.record.error:
            return self.record.error
        rollout = self.record.rollout
        is_truncated = rollout is not None and rollout.finish_reason == "length" and not self.ended.is_late
        return "" if is_truncated else self.ended.failure


class AgentSampler:
    """Sampler of agents' episodes on any engine; see :class:`rlcore.sampling.base.Sampler`.

    ``params.max_new_tokens`` bounds everything after the prompt of a sample.
    """

    def __init__(self, engine: Sampler, tokenizer: ChatTokenizer, config: AgentConfig) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._counts = dict[str, float]()

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._engine.load_weights(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        return self._engine.logprobs(prompt_ids, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str] | None:
        return self._engine.differing_parts(state)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the training episodes since the last call, without the engine's."""
        counts, self._counts = self._counts, {}
        return agent_metrics(counts) if counts else {}

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of episodes per prompt. An agent that crashes is handled as ``on_crash`` says.

        Raises:
            SamplingError: Engine or gateway is broken, or over a tenth of the episodes failed.
            SandboxError, DataError: As :func:`rlcore.agents.program.open_program`.
        """
        episodes = self.play(prompts, params, seed=seed, places=places)
        made = [[rollout_of(each, self._config) for each in group] for group in episodes]
        failed = [each.reason for group in made for each in group if isinstance(each, FailedRollout)]
        if len(failed) > max(1, MAX_FAILURES * sum(map(len, made))):
            raise SamplingError(
                f"agents failed in {len(failed)} of {sum(map(len, made))} episodes (limit {MAX_FAILURES:.0%}): "
                f"{failed[0]}",
                fix="rlcore agent-check shows what they do; if a wrong answer of the policy may break them, set "
                "on_crash = 'zero'",
            )
        return made

    def play(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Episode]]:
        """Return a group of episodes per prompt, as they ended. No process of an agent is left, whatever happens."""
        numbers = range(len(prompts)) if places is None else places
        keys = [(i, j) for i in range(len(prompts)) for j in range(params.num_samples)]
        limits = Limits(
            max_calls=self._config.max_calls,
            max_new_tokens=params.max_new_tokens,
            max_tokens=self._config.max_prompt_tokens + params.max_new_tokens,
            reward_range=self._config.reward_range,
        )
        with (
            open_program(self._config) as program,
            Gateway(
                self._engine,
                self._tokenizer,
                limits,
                temperature=params.temperature,
                greedy=params.greedy,
                seed=seed,
                socket=program.socket,
            ) as gateway,
        ):
            found = self._run(
                gateway, lambda agents, i, j: self._episode(gateway, program, agents, prompts[i], numbers[i], j), keys
            )
            if not params.greedy:
                self._count(found, gateway.statistics)
        episodes = iter(found)
        return [[next(episodes) for _ in range(params.num_samples)] for _ in prompts]

    def _run(
        self, gateway: Gateway, play: Callable[[Agents, int, int], Episode], keys: Sequence[tuple[int, int]]
    ) -> list[Episode]:
        agents, threads = Agents(), ThreadPoolExecutor(self._config.max_concurrent, thread_name_prefix="agent")
        try:
            futures = [threads.submit(play, agents, i, j) for i, j in keys]
            gateway.serve(lambda: all(each.done() for each in futures) or _error(futures) is not None)
            if error := _error(futures):
                raise error
            return [future.result() for future in futures]
        finally:  # also after Ctrl-C and errors of the engine
            agents.end()
            threads.shutdown(cancel_futures=True)

    def _episode(
        self, gateway: Gateway, program: Program, agents: Agents, prompt: Prompt, place: int, sample: int
    ) -> Episode:
        session = gateway.open(prompt, place=place, sample=sample)
        try:
            with program.folder(prompt) as folder:
                environment = program.environment(session.key, folder, gateway.url)
                ended = agents.run(program.command(folder), environment, folder, seconds=self._config.timeout_seconds)
        finally:
            record = gateway.close(session)
        return Episode(prompt=prompt, ended=ended, record=record)

    def _count(self, episodes: Sequence[Episode], statistics: Mapping[str, float]) -> None:
        new = {
            **statistics,
            "episodes": len(episodes),
            "failed": sum(bool(each.failure) for each in episodes),
            "timed_out": sum(each.ended.is_late for each in episodes),
            "rewarded": sum(each.record.reward is not None for each in episodes),
        }
        self._counts = {name: self._counts.get(name, 0.0) + value for name, value in new.items()}


def rollout_of(episode: Episode, config: AgentConfig) -> Rollout | FailedRollout:
    """Return an episode as a rollout, with the agent's own reward if it posted one.

    An agent that fails makes a failed rollout, or with ``on_crash`` ``zero`` one with an empty answer and the own
    reward 0. Without any answered call the rollout is a failed one: it has no token.
    """
    prompt, rollout, failure = episode.prompt, episode.record.rollout, episode.failure
    if rollout is None:
        return FailedRollout(prompt=prompt, reason=f"the agent had no call answered; {failure or 'exit code 0'}")
    if rollout.branches and config.branches == "refuse":
        forks = f"{rollout.branches[0].fork} (branches = 'refuse')"
        return FailedRollout(prompt=prompt, reason=f"the episode has {len(rollout.samples)} samples: {forks}")
    if rollout.branches and config.branches == "main":
        rollout = _main_alone(rollout)
    if not failure:
        return replace(rollout, environment_reward=episode.record.reward)
    if config.on_crash == "zero":
        return replace(rollout, text="", environment_reward=0.0)
    return FailedRollout(prompt=prompt, reason=f"the agent failed: {failure}")


def agent_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a batch of episodes from its sums."""
    episodes, calls = counts["episodes"], max(1, counts["calls"])
    return {
        "agents/calls": counts["calls"] / episodes,
        "agents/failed": counts["failed"] / episodes,
        "agents/timed_out": counts["timed_out"] / episodes,
        "agents/own_rewards": counts["rewarded"] / episodes,
        "agents/late_calls": counts["late_calls"] / episodes,
        "agents/refused_calls": counts["refused"] / episodes,
        "agents/retried_calls": counts["retries"] / episodes,
        "agents/unparsed_calls": counts["unparsed_calls"] / calls,
        "agents/cut_answers": counts["cut_answers"] / calls,
        "agents/requests_per_engine_call": counts["requests"] / max(1, counts["engine_calls"]),
        "agents/overhead_seconds": counts["overhead_seconds"] / calls,
    }


def _main_alone(rollout: Rollout) -> Rollout:
    """Return the sample with the last answer; the audit compares its tokens with those sampled for it."""
    dropped = sum(sum(branch.loss_mask) for branch in rollout.branches)
    count = None if rollout.num_sampled is None else rollout.num_sampled - dropped
    return replace(rollout, branches=(), num_sampled=count)


def _error(futures: Sequence[Future[Episode]]) -> BaseException | None:
    return next((error for each in futures if each.done() and (error := each.exception())), None)
