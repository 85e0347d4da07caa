"""Tree of an episode's sampled answers.

A request whose conversation continues an answer that was given becomes its child: the tokens of the answer are
extended. Any other request becomes a root or a further child, and the reason is recorded:

    call 1 ── call 2 ── call 4        the agent appends to its history
                 └───── call 5        "message 4 (user) differs"
    call 3                            "another conversation"

An answer that a stop string cut ends with the token that completes the string. A later request reads these tokens, and
then the template's end of the turn, which is not trained. If the agent writes the answer otherwise than it saw it, the
request is no continuation. After an answer that a limit cut, a request is a root: the policy did not choose to end.

Conversations are compared in a canonical form: arguments of calls as values, the assistant's messages without thoughts
and surrounding whitespace, and each tool output with the position of its call instead of an id.

Each answer that no other continues ends a sample: the last answer ends the episode, the others end its branches. An
answer that samples share is trained in the first only. Above, if call 4 was answered last, the episode is 1, 2, 4. In
its branch 1, 2, 5 the first two are read, not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rlcore.agents.rendering import PromptRenderer
from rlcore.agents.requests import Request, Turn
from rlcore.environments.base import split_thought
from rlcore.errors import shown
from rlcore.text.text_parts import Ids
from rlcore.types import Prompt, Rollout, ToolCall

_MAX_SHOWN = 60  # characters of a message in a reason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Place of a request in the tree.

    Attributes:
        path: Answers from the root to the one that the request continues; empty for a root.
        digests: Digest of the tools, and of each beginning of the conversation.
        added: Token ids after the last answer; for a root, the whole prompt.
        text: Prompt as the chat template writes it, with marks for sampled answers.
    """

    request: Request
    digests: Sequence[str]
    path: tuple[Node, ...] = ()
    fork: str
    added: Ids
    text: str

    @property
    def parent(self) -> Node | None:
        return self.path[-1] if self.path else None

    @property
    def root_ids(self) -> Ids:
        return self.path[0].placement.added if self.path else self.added

    @property
    def prompt_ids(self) -> Ids:
        ids: list[int] = []
        for node in self.path:
            ids += (*node.placement.added, *node.rollout.completion_ids)
        return (*ids, *self.added)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """Sampled answer in the tree.

    Attributes:
        number: Number of the call.
        order: Number of the answered request; later ones have larger numbers.
        rollout: Answer within its own limit, up to the token that completes a stop string.
        turn: Answer as the agent sees it.
        fork: Reason why it is a branch of its own, or "".
    """

    number: int
    order: int
    placement: Placement
    rollout: Rollout
    turn: Turn
    fork: str

    @property
    def path(self) -> tuple[Node, ...]:
        return (*self.placement.path, self)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return (*self.placement.request.turns, self.turn)

    @property
    def digests(self) -> Sequence[str]:
        return (*self.placement.digests, _next_digest(self.placement.digests[-1], _canonical(self.turn, {})))


class CallTree:
    """Answers of an episode, and the places of its requests, in order."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._placements: list[Placement] = []
        self._nodes: dict[str, Node] = {}  # by key: of equal conversations, the newest

    def place(self, request: Request) -> Placement:
        """Return the place of a request.

        Raises:
            ApiError: The chat template cannot write the conversation.
        """
        digests = conversation_digests(request.tools, request.turns)
        parent = next((self._nodes[digest] for digest in reversed(digests) if digest in self._nodes), None)
        return self._placed(request, digests, parent)

    def hold(self, placement: Placement) -> None:
        self._placements.append(placement)

    def remove(self, placement: Placement) -> None:
        self._placements.remove(placement)

    def add(self, node: Node) -> None:
        self._nodes[node.digests[-1]] = node

    def _placed(self, request: Request, digests: Sequence[str], parent: Node | None) -> Placement:
        why = self._why(request, digests, parent)
        ending = None if parent is None else self._ending(parent)
        if parent is not None and ending is not None:
            answers = [len(node.turns) - 1 for node in parent.path]
            before = parent.placement.text
            tail = self._renderer.tail(request.turns, request.tools, answers=answers, before=before)
            if tail is not None:
                added, path = (*ending, *tail[0]), parent.path
                return Placement(request=request, digests=digests, path=path, fork=why, added=added, text=tail[1])
            why = why or "the chat template writes the earlier messages differently now"
        elif parent is not None:
            why = "the answer before was cut at its limit"
        ids, text = self._renderer.root(request.turns, request.tools)
        return Placement(request=request, digests=digests, fork=why, added=ids, text=text)

    def _ending(self, node: Node) -> Ids | None:
        """Return the tokens that end an answer and were not sampled; None for an answer that a limit cut."""
        if node.rollout.completion_ids[-1] in self._renderer.tokenizer.eos_ids:
            return ()
        return self._renderer.tokenizer.end_of_turn if node.rollout.finish_reason == "stop" else None

    def _why(self, request: Request, digests: Sequence[str], parent: Node | None) -> str:
        others = [each for each in self._placements if each.parent is parent]
        if not others:
            return ""
        if any(each.digests[-1] == digests[-1] for each in others):
            return "the same request again"
        if all(each.digests[0] != digests[0] for each in others):
            return "the tools were changed"
        known = [(node.digests, node.turns) for node in list(self._nodes.values())]
        known += [(each.digests, each.request.turns) for each in others]
        pairs = [(_common(digests, theirs) - 1, turns) for theirs, turns in known]
        shared, closest = max(pairs, key=lambda pair: (pair[0], len(pair[1])))
        return _difference(request.turns, closest, shared, is_root=parent is None)


def conversation_digests(tools: str, turns: Sequence[Turn]) -> list[str]:
    """Return a digest of the tools, and of each beginning of a conversation, from one turn to all."""
    digests = [_next_digest("", json.loads(tools or "[]"))]
    places: dict[str, str] = {}
    for index, turn in enumerate(turns):
        places |= {call.call_id: f"{index}.{number}" for number, call in enumerate(turn.calls)}
        digests.append(_next_digest(digests[-1], _canonical(turn, places)))
    return digests


def _next_digest(before: str, value: object) -> str:
    return hashlib.sha256(f"{before}{json.dumps(value, sort_keys=True)}".encode()).hexdigest()


def _canonical(turn: Turn, places: Mapping[str, str]) -> list[object]:
    if turn.role == "tool":
        return [turn.role, turn.content, places.get(turn.call_id, "")]
    if turn.role != "assistant":
        return [turn.role, turn.content]
    calls = [[call.name, json.loads(call.arguments)] for call in turn.calls]
    return [turn.role, split_thought(turn.content)[1].strip(), calls]


def _difference(turns: Sequence[Turn], closest: Sequence[Turn], shared: int, *, is_root: bool) -> str:
    if all(turn.role == "system" for turn in turns[:shared]) and is_root:
        return "another conversation"
    if shared == len(closest):
        return f"message {shared} had no answer yet"
    if shared == len(turns):
        return f"the messages after message {shared} were removed"
    was, now = closest[shared], turns[shared]
    start = max(0, _common(_text(was), _text(now)) - _MAX_SHOWN // 3)
    return f"message {shared + 1} differs: {_shown(now, start)} instead of {_shown(was, start)}"


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _shown(turn: Turn, start: int) -> str:
    return f"{turn.role} '{'…' if start else ''}{shown(_text(turn)[start:], max_chars=_MAX_SHOWN)}'"


def _text(turn: Turn) -> str:
    return turn.content or ", ".join(f"{call.name}({call.arguments})" for call in turn.calls)


def episode_of(prompt: Prompt, nodes: Sequence[Node], *, is_cut: bool) -> Rollout | None:
    """Return the rollout of an episode; None without an answer. ``is_cut``: a limit ended it after the last answer."""
    inner = {id(node) for leaf in nodes for node in leaf.placement.path}
    leaves = [node for node in nodes if id(node) not in inner]
    if not leaves:
        return None
    main = max(leaves, key=lambda leaf: (leaf.order, -leaf.number))  # of n answers, the first
    trained: set[int] = set()
    samples = []
    for leaf in [main, *(leaf for leaf in leaves if leaf is not main)]:
        samples.append(_sample(prompt, leaf, trained, nodes))
        trained |= {id(node) for node in leaf.path}
    return replace(
        samples[0],
        fork="",
        branches=tuple(samples[1:]),
        finish_reason="length" if is_cut else samples[0].finish_reason,
    )


def _sample(prompt: Prompt, leaf: Node, trained: Collection[int], nodes: Sequence[Node]) -> Rollout:
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for node in leaf.path:
        added = node.placement.added if node is not leaf.path[0] else ()
        sampled, is_own = node.rollout.completion_ids, id(node) not in trained
        ids += (*added, *sampled)
        logprobs += (*(0.0 for _ in added), *(node.rollout.sampler_logprobs if is_own else (0.0 for _ in sampled)))
        mask += (*(False for _ in added), *(is_own for _ in sampled))
    return Rollout(
        prompt=replace(prompt, token_ids=leaf.placement.root_ids),
        completion_ids=tuple(ids),
        sampler_logprobs=tuple(logprobs),
        loss_mask=tuple(mask),
        policy_version=min(node.rollout.policy_version for node in leaf.path),
        finish_reason=leaf.rollout.finish_reason,
        text=leaf.rollout.text,
        tool_calls=_tool_calls(leaf),
        fork=_fork(leaf, trained, nodes),
        replica=leaf.path[0].rollout.replica,
    )


def _fork(leaf: Node, trained: Collection[int], nodes: Sequence[Node]) -> str:
    first = next(node for node in leaf.path if id(node) not in trained)
    beside = [node for node in nodes if node.placement.parent is first.placement.parent and node is not first]
    return next((node.fork for node in [first, *beside] if node.fork), "another conversation")


def _tool_calls(leaf: Node) -> tuple[ToolCall, ...]:
    """Return the earlier turns with what the agent sent after each; a turn without a call names no tool."""
    found = []
    for node, following in zip(leaf.path, leaf.path[1:], strict=False):
        sent: Sequence[Turn] = following.placement.request.turns[len(node.turns) :]
        names = ", ".join(call.name for call in node.turn.calls)
        output = "\n".join(turn.content for turn in sent)
        found.append(ToolCall(text=node.rollout.text, tool=names, output=output, is_error=False))
    return tuple(found)
