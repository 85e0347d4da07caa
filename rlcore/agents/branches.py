"""An episode of an agent as a rollout with branches.

Each answer that no other continues ends a sample. The sample with the last answer is the episode; the others are its
branches. An answer that several samples share is trained in the first of them only:

    call 1 ── call 2 ── call 4        call 4 was answered last: the episode is 1, 2, 4
                 └───── call 3        its branch is 1, 2, 3; 1 and 2 are read there, not trained
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rlcore.agents.history import Node
from rlcore.agents.wire.conversation import Turn
from rlcore.types import Prompt, Rollout, ToolCall


def episode_of(prompt: Prompt, nodes: Sequence[Node], *, is_cut: bool) -> Rollout | None:
    """Return the rollout of an episode without its number of sampled tokens; None without an answer.

    ``is_cut``: a limit ended the episode after its last answer.
    """
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
    """Return the sample that ends with ``leaf``; ``trained``: answers that earlier samples train."""
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
    """Return why a sample is one of its own: the reason of its first own answer, or of the one beside it."""
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
