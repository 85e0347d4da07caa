"""Settings of sampling: the rollout engine, episodes with tools, programs of the user, and the rollouts themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Literal

from rlcore.errors import ConfigError
from rlcore.strict_config import (
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scalar,
    at_least,
    below,
    between,
)

TransferKind = Literal["auto", "file", "shared_memory", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Timeouts of an engine."""

    # seconds until a started server must answer; raise it for large models and slow disks
    startup_seconds: Duration = 600.0
    # per completion, which is then requested again; 0: ten minutes plus 0.1 s for each token
    request_seconds: Annotated[float, at_least(0.0), below(1e6)] = 0.0

    def for_request(self, num_tokens: int) -> float:
        """Return the seconds that a completion of ``num_tokens`` may take."""
        return self.request_seconds or 600.0 + 0.1 * num_tokens


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """GPUs of the servers that the run starts."""

    # indices among the visible GPUs, assigned in order; empty: all but the trainer's, or that one if it is the only
    devices: tuple[NonNegativeInt, ...] = ()
    tensor_parallel: PositiveInt = 1  # GPUs per server
    gpu_memory_utilization: Fraction = 0.0  # 0: 0.85 of free memory; on the learner's GPU at most 0.4 of all memory


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine that samples completions. Several servers share the prompts."""

    kind: Literal["native", "vllm"] = "native"  # `native`: in this process; `vllm`: servers
    python: str = ""  # interpreter that has vLLM, for servers that the stage starts and stops; empty: this one
    urls: tuple[str, ...] = ()  # running servers to use, instead of starting some
    replicas: PositiveInt = 1  # number of servers to start
    gpus: GpuConfig = field(default_factory=GpuConfig)
    # `file`: through `weight_dir`; `shared_memory`: a file in memory; `gloo` (TCP), `nccl`, `ipc` (between GPUs): by
    # vLLM's API; `auto`: for a started server `nccl` between GPUs if vLLM is installed here too, else `shared_memory`;
    # for a running one, or if memory is short, `file`
    weight_transfer: TransferKind = "auto"
    # folder of `file`, which the server must see; empty: a folder in memory if there is one, else a temporary one
    weight_dir: str = ""
    # precision of the engine; `auto`: the learner's compute precision
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NonNegativeInt = 0  # tokens of prompt and completion; 0: fits the longest text
    kv_cache_gib: NonNegativeFloat = 0.0  # of the KV cache per server; 0: the rest of gpus.gpu_memory_utilization
    enforce_eager: bool | None = None  # false: compile, with CUDA graphs; starts slower; left out: false on GPUs only
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        is_placed = bool(self.gpus.devices) or self.gpus.tensor_parallel > 1
        if self.urls and (self.python or self.replicas > 1 or is_placed):
            raise ConfigError(
                "urls uses running servers; python, replicas and gpus start new ones: set one or the other"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("urls has a server twice")
        if self.weight_dir and self.weight_transfer == "shared_memory":
            raise ConfigError("weight_transfer = 'shared_memory' needs no folder: leave weight_dir empty")
        named, width = len(self.gpus.devices), self.gpus.tensor_parallel
        if named and named != self.replicas * width:
            raise ConfigError(
                f"gpus.devices has {named} GPUs, {self.replicas} replicas of {width} need {self.replicas * width}: "
                "list one for each, and a GPU twice if two replicas share it"
            )

    @property
    def numbers(self) -> Mapping[str, object]:
        """Settings that change results, for the cache key of a stage. Location and speed are left out."""
        if self.kind == "native":
            return {"kind": self.kind}
        names = ("kind", "dtype", "max_model_len", "enforce_eager")
        return {name: getattr(self, name) for name in names} | {"tensor_parallel": self.gpus.tensor_parallel}


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Episodes of several turns with tools. Without ``tools`` and ``environment`` every completion is one turn.

    ``sampling.max_new_tokens`` limits turns and tool output together.
    """

    tools: tuple[Literal["calculator", "python", "search"], ...] = ()  # built-in tools that the policy may call
    max_turns: PositiveInt = 4  # most turns of the policy in an episode
    max_turn_tokens: PositiveInt = 512  # tokens of one turn; another turn begins only if they still fit
    # tokens of one tool output; longer output is truncated and ends with `[cut]`
    max_tool_output_tokens: Annotated[int, at_least(16)] = 256
    environment: str = ""  # custom class `module:Class`, whose public methods are tools
    options: Mapping[str, Scalar] = field(default_factory=dict)  # arguments of the environment
    files: tuple[str, ...] = ()  # data files that the environment reads
    timeout_seconds: Duration = 5.0  # for one Python program, and for one call of the environment
    search_corpus: str = ""  # for search: a JSONL or Parquet file of passages
    search_top_k: PositiveInt = 3  # per search
    # role of the message with the output; `user` for chat templates without a role `tool`
    tool_role: Literal["tool", "user"] = "tool"
    # syntax of a call; `template`: that of the chat template, or `ours` if it has none
    call_format: Literal["template", "hermes", "llama3", "mistral", "ours"] = "template"

    @property
    def has_tools(self) -> bool:
        """True if the policy can call a tool."""
        return bool(self.tools or self.environment)

    @property
    def module(self) -> str:
        """Module of the environment, or ""."""
        return self.environment.partition(":")[0]

    def __post_init__(self) -> None:
        if self.environment and ":" not in self.environment:
            raise ConfigError(f"environment = {self.environment!r} is not written as module:Class")
        if (self.options or self.files) and not self.environment:
            raise ConfigError("options and files need environment")
        if len(set(self.tools)) < len(self.tools):
            raise ConfigError("tools has a tool twice")
        if ("search" in self.tools) != bool(self.search_corpus):
            raise ConfigError("the tool search needs search_corpus, and search_corpus needs the tool search")


RESERVED = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RLCORE_TASK", "HOME", "TMPDIR")
"""Environment variables that rlcore sets for each episode."""
_MAX_REWARD = 1e6  # so that the statistics of a group are finite


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Program that plays the episodes by calls of an OpenAI-compatible API, which the policy answers.

    Each episode has its own process and an empty working folder with copies of ``files``.
    """

    command: tuple[str, ...]  # words of the command that starts the program
    files: tuple[str, ...] = ()  # files and folders that are copied into the working folder
    # columns of the task's row that the program may read; none by default: they may hold the answer
    columns: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # further environment variables; no secrets
    timeout_seconds: Annotated[float, between(0.1, 604_800.0)] = 600.0  # of an episode
    max_calls: PositiveInt = 32  # of an episode
    # of a first request, with system message and tools; `sampling.max_new_tokens` limits the rest
    max_prompt_tokens: PositiveInt = 1024
    max_concurrent: PositiveInt = 16  # agents at the same time
    # samples of an episode whose history was changed: train on all, on the one with the last answer, or refuse it
    branches: Literal["train", "main", "refuse"] = "train"
    # an episode whose agent fails has no score, or an empty answer and the own reward 0
    on_crash: Literal["unscored", "zero"] = "unscored"
    reward_range: tuple[float, ...] = (0.0, 1.0)  # least and greatest reward that the program may post
    # bubblewrap with limits, without files and network of this machine; false: the rights of the user, and it can read
    # the keys of other episodes
    sandbox: bool = True
    sandbox_read: tuple[str, ...] = ()  # more paths that the program may read

    @property
    def without_folders(self) -> AgentConfig:
        """Return the config with files as bare names: cache keys cover their content, not their location."""
        return replace(self, files=tuple(PurePath(file).name for file in self.files), sandbox_read=())

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("command has no word; give one, such as ['python', 'agent.py']")
        if own := [name for name in RESERVED if name in self.env]:
            raise ConfigError(f"env.{own[0]} is set by rlcore for each episode: leave it out")
        names = [PurePath(file).name for file in self.files]
        if len(set(names)) < len(names):
            raise ConfigError("files has two files of one name, which one working folder cannot hold")
        if len(bounds := self.reward_range) != 2 or not -_MAX_REWARD <= bounds[0] < bounds[1] <= _MAX_REWARD:
            what = f"must be two numbers from -{_MAX_REWARD:g} to {_MAX_REWARD:g}, the lower first"
            raise ConfigError(f"reward_range = {list(bounds)}: {what}")
        if self.sandbox_read and not self.sandbox:
            raise ConfigError("sandbox_read has no effect with sandbox = false: leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of rollouts. There is no top-p, top-k or min-p: a filtered distribution biases the ratio."""

    temperature: PositiveFloat = 1.0  # of sampling; higher: more exploration
    # length limit of a completion, in episodes of all turns; raise it if many are truncated
    max_new_tokens: PositiveInt
    max_concurrent: PositiveInt = 256  # sequences decoded at the same time
    dynamic_sampling_rounds: NonNegativeInt = 0  # rounds that replace zero-signal groups; 0: off
    zero_signal_keep_prob: Fraction = 1.0  # probability p of sampling a prompt after a zero-signal group; p^n after n
    staleness: NonNegativeInt = 0  # iterations prefetched during updates; rollouts are up to this number of updates old
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    agent: AgentConfig | None = None  # left out: no agent plays
    engine: EngineConfig | None = None  # left out: the run's engine

    def __post_init__(self) -> None:
        if self.episodes.has_tools and self.episodes.max_turn_tokens > self.max_new_tokens:
            raise ConfigError("episodes.max_turn_tokens must not exceed max_new_tokens, which limits all turns")
        if self.agent and self.episodes.has_tools:
            raise ConfigError("agent plays the episodes with tools of its own: leave out episodes")
        if self.staleness and self.dynamic_sampling_rounds:
            raise ConfigError(
                f"dynamic_sampling_rounds needs rewards before it samples more, but staleness = {self.staleness} "
                "samples before rewards are known: set one to 0"
            )

    def require_no_rl(self) -> None:
        """Refuse what only the iterations of online RL can do."""
        of_rl = {"staleness": 0, "dynamic_sampling_rounds": 0, "zero_signal_keep_prob": 1.0}
        if wrong := [name for name, default in of_rl.items() if getattr(self, name) != default]:
            raise ConfigError("\n".join(f'sampling.{name} is only valid for kind = "rl"' for name in wrong))


def player_of(episodes: EpisodeConfig, agent: AgentConfig | None) -> Literal["none", "tools", "agent"]:
    """Return the row of the table of players: an agent, episodes with tools, or neither."""
    return "agent" if agent else "tools" if episodes.has_tools else "none"
