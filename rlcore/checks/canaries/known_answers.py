"""Prompts whose right answer is known, drawn by what they are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import islice

from rlcore.rewards.answers import find_reference
from rlcore.rewards.references import plain_error
from rlcore.types import Prompt

NUM_PROMPTS = 4  # whose answers are asked for, of each term
_MAX_DRAWN = 10_000


def known_answer(prompt: Prompt) -> str | None:
    """The right answer: a code task's ``solution`` in a fenced block, a procedural problem's ``entry.answer``, else the
    reference's own answer. None for a code task that states no solution.
    """
    if prompt.reference.startswith("{"):
        try:
            problem = json.loads(prompt.reference)
            if "solution" in problem:
                return f"\n```python\n{problem['solution']}\n```\n"
            return None if "tests" in problem else str(problem["entry"]["answer"])
        except (ValueError, KeyError, TypeError):
            pass  # mathematics may start with a brace too: {1, 2}
    return find_reference(prompt.reference)


def kind_of(prompt: Prompt) -> str:
    """The verifier that a prompt's reference is for; empty where there is none."""
    if not prompt.reference.strip():
        return ""
    try:
        problem = json.loads(prompt.reference) if prompt.reference.startswith("{") else {}
    except ValueError:
        problem = {}  # {1, 2} is a set
    if "entry" in problem:
        return "procedural"
    return "code" if "tests" in problem or "solution" in problem else "math"


def prompts_for(kind: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts to probe a verifier with: of its own kind, else of any that has a reference; of every task one first.

    They are drawn by what they are, so that the order of the rows decides nothing. One with a reference that grades
    nobody is passed over.
    """
    fitting = [prompt for prompt in prompts if kind_of(prompt) == kind] or [p for p in prompts if kind_of(p)]
    sound = (
        prompt
        for prompt in islice(sorted(fitting, key=_ticket), _MAX_DRAWN)
        if kind_of(prompt) != "math" or not plain_error(prompt.reference)
    )
    open_tasks = {prompt.task for prompt in fitting}
    chosen: list[Prompt] = []
    rest: list[Prompt] = []
    for prompt in sound:
        (chosen if prompt.task in open_tasks else rest).append(prompt)
        open_tasks.discard(prompt.task)
        if len(chosen) >= NUM_PROMPTS or (not open_tasks and len(chosen) + len(rest) >= NUM_PROMPTS):
            break
    return [*chosen, *rest][:NUM_PROMPTS]


def _ticket(prompt: Prompt) -> tuple[int, str, str]:
    text = f"{prompt.prompt_id}\0{prompt.reference}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass")), prompt.prompt_id, prompt.reference
