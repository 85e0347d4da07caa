"""Types of a rollout's life cycle. A later stage is a new frozen type, never a half-filled earlier one.

    Prompt -> Rollout | FailedRollout -> ScoredRollout -> TrainingSample -> (packing) Batch

Per-token fields of a completion have one entry per completion token, aligned with the token that they score:

    completion_ids    [ 5,    9,    2  ]      2 is the end-of-sequence token, an action like any other
    sampler_logprobs  [-0.1, -1.2, -0.01]     natural logarithm, of the tempered distribution
    loss_mask         [True, True, True ]     False on tool output

A tool call makes two turns, each with its EOS; the output between them is not trained on:

    turn, EOS, output, turn, EOS    [ 5,    2,    |  8,     6     |  9,     2  ]
    loss_mask                       [True, True,  |  False, False |  True, True]
    sampler_logprobs                [-0.1, -0.01, |  0.0,   0.0   |  -1.2, -0.02]     not read if the mask is False
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as text and as tokens.

    Attributes:
        reference: Reference answer, or JSON for a verifier of its task; "" if no reward needs it.
        task: Problem family, for metrics and verifiers.
        dataset: Dataset in a run with several.
        tools: JSON list of the tool schemas that the chat template describes, or "".
        columns: JSON object of the other columns of its source row, or "".
        form: ``"text"`` or ``"messages"``, as its source has it.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    reference: str
    task: str
    dataset: str = ""
    tools: str = ""
    columns: str = ""
    form: Literal["text", "messages"] = "messages"

    @property
    def row(self) -> dict[str, Any]:
        """Other columns of its source row, by name: a new dictionary at each access."""
        found: dict[str, Any] = json.loads(self.columns or "{}")
        return found

    @property
    def has_reference(self) -> bool:
        """True if a verifier can compare an answer with a reference answer."""
        return bool(self.reference.strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A turn that ended in a tool call, and the tool's output.

    Attributes:
        text: The whole turn.
        tool: Its name; "" for a malformed call.
        output: As the policy read it, truncated.
    """

    text: str
    tool: str
    output: str
    is_error: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion of a prompt, exactly as sampled (token ids in, token ids out).

    Attributes:
        finish_reason: ``"length"`` if a limit on tokens or turns truncated it.
        text: Decoded last turn without special tokens; never tokenized again.
        tool_calls: Earlier turns, each with a call or before an agent's message.
        environment_reward: Of the episode's environment, or None.
        branches: Other samples of the episode, which no single sequence holds: an agent may rewrite its history. They
            share its score; this rollout has its last answer. Each sampled token is True in exactly one mask.
        fork: Reason for a branch; else "".
        num_sampled: Tokens sampled in an agent's episode; else None.
        replica: Number of the first turn's engine; equality ignores it.
    """

    prompt: Prompt
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    policy_version: int
    finish_reason: FinishReason
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    environment_reward: float | None = None
    branches: tuple[Rollout, ...] = ()
    fork: str = ""
    num_sampled: int | None = None
    replica: int = field(default=0, compare=False)

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """Samples of the episode: this rollout, then its branches."""
        return (self, *self.branches)

    @property
    def trained_samples(self) -> tuple[Rollout, ...]:
        """Samples of the episode that hold a token to train on."""
        return tuple(sample for sample in self.samples if any(sample.loss_mask))

    @property
    def row(self) -> dict[str, Any]:
        """Other columns of the prompt's source row, by name."""
        return self.prompt.row

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Token spans of the policy's turns; see :func:`turn_spans`."""
        return turn_spans(self.loss_mask)

    @property
    def transcript(self) -> str:
        """All turns as readable text, with ``[tool]`` and its output after each call."""
        turns = [f"{call.text}\n[{call.tool or 'no tool'}] {call.output}\n" for call in self.tool_calls]
        return "".join(turns) + self.text


def turn_spans(loss_mask: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the spans (first token, one past the last) of True: ``[True, True, False, True]`` gives (0, 2), (3, 4)."""
    runs = (list(run) for is_own, run in groupby(range(len(loss_mask)), key=loss_mask.__getitem__) if is_own)
    return tuple((run[0], run[-1] + 1) for run in runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRollout:
    """A completion that the engine could not produce; counted, never trained on."""

    prompt: Prompt
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A grader's result for one rollout.

    Attributes:
        value: Total reward, or None if the *grader* (not the answer) failed: it leaves the group's baseline and has
            advantage 0.
        terms: Reward terms before weighting, by name.
        turn_rewards: Part of ``value`` for each turn's end; the rest is for the last token. Only GAE uses it.
        skipped: Terms that do not apply to the rollout.
    """

    value: float | None
    terms: Mapping[str, float]
    error: str = ""
    turn_rewards: tuple[float, ...] = ()
    skipped: tuple[str, ...] = ()


CORRECT_FROM = 0.99  # graders with partial credit return floats near 1


def is_correct(score: Score, correct_from: float = CORRECT_FROM) -> bool:
    """Return True if the score is ``correct_from`` or more. This is the only definition of "correct"."""
    return score.value is not None and score.value >= correct_from


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollout:
    """A rollout with its score."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingSample:
    """One sample ready for the update; tensors are 1-D, one entry per completion token, on the CPU.

    Tensors are float32 [T]; those of a disabled loss term (no reference policy, no critic) are zeros and are not read.
    ``episode``, ``group``: numbers within the iteration. An episode's samples share one advantage and one weight.
    """

    episode: int
    group: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    loss_mask: Bool[Tensor, "time"]
    sampler_logprobs: Float[Tensor, "time"]
    old_logprobs: Float[Tensor, "time"]
    ref_logprobs: Float[Tensor, "time"]
    advantages: Float[Tensor, "time"]
    values: Float[Tensor, "time"]
    returns: Float[Tensor, "time"]
    replica: int = 0
