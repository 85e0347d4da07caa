"""Does a completion keep to the answer format? Counting and searching alone: linear time for any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.rewards.answers import final_part, marked_answers
from rlcore.rewards.base import graded
from rlcore.types import Rollout, Score

_THINK = ("<think>", "</think>")
_KINDS = {"boxed": "box", "answer_tag": "tag", "hashes": "hashes"}


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """``boxed``, ``answer_tag``, ``hashes``: exactly one non-empty marker of that kind after the thinking.

    ``think_answer``: the whole completion is ``<think>…</think><answer>…</answer>``, each tag once; the opening
    ``<think>`` may be missing, because chat templates prefill it.
    """

    style: Literal["boxed", "answer_tag", "hashes", "think_answer"]


class FormatReward:
    """1.0 for a completion in the format, else 0.0."""

    name = "format"

    def __init__(self, options: FormatOptions) -> None:
        self._options = options

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [graded(self.name, float(has_format(rollout.text, self._options.style))) for rollout in rollouts]


def has_format(text: str, style: str) -> bool:
    """Whether ``text`` is in the format ``style`` (see :class:`FormatOptions`)."""
    if style == "think_answer":
        return _is_think_answer(text.strip())
    part = final_part(text)
    if part is None:
        return False
    marked = [marked for marked in marked_answers(part) if marked.kind == _KINDS[style]]
    return len(marked) == 1 and bool(part[slice(*marked[0].inner)].strip())


def _is_think_answer(text: str) -> bool:
    opening, closing = _THINK
    text = text.removeprefix(opening)
    thinking, closed, answer = text.partition(closing)
    answer = answer.strip()
    inside = answer.removeprefix("<answer>").removesuffix("</answer>")
    tags = (*_THINK, "<answer>", "</answer>")
    return (
        bool(closed)
        and bool(thinking.strip())
        and len(answer) == len(inside) + len("<answer></answer>")
        and bool(inside.strip())
        and not any(tag in piece for tag in tags for piece in (thinking, inside))
    )
