"""Choice of prompts with known answers, independent of their order."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import islice

from rlcore.rewards.answers import accepted_answers, find_reference
from rlcore.rewards.references import plain_error
from rlcore.types import Prompt

NUM_PROMPTS = 4  # per reward term
_MAX_CANDIDATES = 10_000


def known_answer(prompt: Prompt) -> str | None:
    """Return the right answer of a prompt, or None for a code task without a solution.

    It is a code task's ``solution`` in a fenced block, a procedural problem's ``entry.answer``, or the reference's
    answer.
    """
    if prompt.reference.startswith("{"):
        try:
            problem = json.loads(prompt.reference)
            if "solution" in problem:
                return f"\n```python\n{problem['solution']}\n```\n"
            return None if "tests" in problem else str(problem["entry"]["answer"])
        except (ValueError, KeyError, TypeError):
            pass  # mathematics may start with a brace too: {1, 2}
    usable = [each for each in accepted_answers(prompt.reference) if not plain_error(each)]
    return find_reference((usable or [prompt.reference])[0])


def kind_of(prompt: Prompt) -> str:
    """Return the verifier of a prompt's reference, or ""."""
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
    """Return prompts to probe a verifier: of its own kind, else any with a reference, and first one of each task.

    The choice depends on the prompts' content, not on their order. Prompts with an unusable reference are skipped.
    """
    fitting = [prompt for prompt in prompts if kind_of(prompt) == kind] or [p for p in prompts if kind_of(p)]
    usable = (
        prompt
        for prompt in islice(sorted(fitting, key=_sort_key), _MAX_CANDIDATES)
        if kind_of(prompt) != "math" or not plain_error(prompt.reference)
    )
    open_tasks = {prompt.task for prompt in fitting}
    chosen: list[Prompt] = []
    rest: list[Prompt] = []
    for prompt in usable:
        (chosen if prompt.task in open_tasks else rest).append(prompt)
        open_tasks.discard(prompt.task)
        if len(chosen) >= NUM_PROMPTS or (not open_tasks and len(chosen) + len(rest) >= NUM_PROMPTS):
            break
    return [*chosen, *rest][:NUM_PROMPTS]


def _sort_key(prompt: Prompt) -> tuple[int, str, str]:
    text = f"{prompt.prompt_id}\0{prompt.reference}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass")), prompt.prompt_id, prompt.reference
