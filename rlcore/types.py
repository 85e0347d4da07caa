"""The stages of a rollout's life, each a frozen type. A later stage is a new type, never a half-filled earlier one.

    Prompt -> Rollout | FailedRollout -> ScoredRollout -> TrainingSample -> (packing) Batch

Per-token fields of a completion have one entry per completion token, aligned with the token that they score:

    completion_ids    [ 5,    9,    2  ]      2 is the end-of-sequence token, an action like any other
    sampler_logprobs  [-0.1, -1.2, -0.01]     natural logarithm, of the tempered distribution
    loss_mask         [True, True, True ]     False on tool output

A completion with a tool call has two turns, each with its EOS; between them stands what the tool said, in the chat
template's words, which the policy reads and is not trained on:

    turn, EOS, output, turn, EOS    [ 5,    2,    |  8,     6     |  9,     2  ]
    loss_mask                       [True, True,  |  False, False |  True, True]
    sampler_logprobs                [-0.1, -0.01, |  0.0,   0.0   |  -1.2, -0.02]     not read where the mask is False
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

FinishReason = Literal["stop", "length"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the policy is asked, as text and as tokens.

    ``Prompt(prompt_id="add-17", messages=(Message(role="user", content="3 + 4 = ?"),), token_ids=(1, 8, 9),
    reference="7", task="arithmetic")``

    ``reference`` is what the verifier needs (a ground truth, or JSON for a task's own scorer); ``""`` when the
    reward does not need one. ``task`` names the family of problems, for per-task figures and verifiers. ``dataset`` is
    the name of the data set that the prompt is of, where a run has several: rewards may be on some of them alone.
    ``tools``: the JSON schemas of the tools that the chat template describes in it, as one JSON list; ``""`` for none.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    reference: str
    task: str
    dataset: str = ""
    tools: str = ""

    @property
    def has_reference(self) -> bool:
        """Whether there is something that a verifier can compare an answer with."""
        return bool(self.reference.strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A turn that ended in a tool call, and what the policy was told.

    ``ToolCall(text="<tool:calculator>3+4</tool>", tool="calculator", output="7", is_error=False)``

    ``text`` is the whole turn as the policy wrote it, ``output`` what it read afterwards, cut as it was. ``is_error``:
    the output is an error message. ``tool`` is ``""`` where the call was malformed.
    """

    text: str
    tool: str
    output: str
    is_error: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion of a prompt, exactly as sampled (token ids in, token ids out).

    ``finish_reason`` is the engine's word: ``"length"`` means cut by the limit of tokens, or of turns. ``text`` is the
    decoded last turn without special tokens, for verifiers and people; it is never tokenized again. ``tool_calls``
    are the turns before it, each of which ended in a call; without tools there are none. ``environment_reward``: what
    the episode's environment says that it was worth; None where there is none, or where it says nothing. ``replica``:
    the number of the engine that sampled it (its first turn), of a run that has several. Draws do not depend on it, and
    two that differ in it alone are equal.
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
    replica: int = field(default=0, compare=False)

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Where the policy's turns lie; see :func:`turn_spans`."""
        return turn_spans(self.loss_mask)

    @property
    def transcript(self) -> str:
        """Every turn, for people, after each call ``[tool]`` and what it said; without calls, the text alone."""
        turns = [f"{call.text}\n[{call.tool or 'no tool'}] {call.output}\n" for call in self.tool_calls]
        return "".join(turns) + self.text


def turn_spans(loss_mask: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """(first token, one past the last) of each run of True: ``[True, True, False, True]`` has (0, 2) and (3, 4)."""
    runs = (list(run) for is_own, run in groupby(range(len(loss_mask)), key=loss_mask.__getitem__) if is_own)
    return tuple((run[0], run[-1] + 1) for run in runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRollout:
    """A completion that the engine could not produce: counted, never trained on."""

    prompt: Prompt
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A grader's verdict.

    ``value`` is the total reward, or ``None`` when the *grader* failed (then ``error`` says why): such a rollout
    leaves the group's baseline and has advantage 0. A wrong or unparsable *answer* is a value, not an error.
    ``parts`` holds each component before weighting, by name. ``turn_rewards`` says how much of ``value`` was earned
    at the end of each turn (:attr:`Rollout.turns`); what is left of it comes at the last token, and empty means all
    of it does. Only advantages per token (GAE) see the difference. ``skipped`` names the parts that are not on the
    rollout's data set: they neither paid nor failed.
    """

    value: float | None
    terms: Mapping[str, float]
    error: str = ""
    turn_rewards: tuple[float, ...] = ()
    skipped: tuple[str, ...] = ()


CORRECT_FROM = 0.99  # graders with partial credit return floats near 1


def is_correct(score: Score) -> bool:
    """Whether an answer is correct: it was scored, at 0.99 or more. Nothing else is meant by "correct" anywhere."""
    return score.value is not None and score.value >= CORRECT_FROM


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollout:
    """A rollout with its score."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingSample:
    """One completion ready for the update; the tensors are 1-D, one entry per completion token, on the CPU.

    ``advantages``, ``old_logprobs``, ``sampler_logprobs``, ``ref_logprobs``, ``values``, ``returns``: float32 [T].
    Where a term of the loss is off (no reference at beta = 0, no critic), its tensor is zeros and is not read.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    loss_mask: Bool[Tensor, "time"]
    sampler_logprobs: Float[Tensor, "time"]
    old_logprobs: Float[Tensor, "time"]
    ref_logprobs: Float[Tensor, "time"]
    advantages: Float[Tensor, "time"]
    values: Float[Tensor, "time"]
    returns: Float[Tensor, "time"]
