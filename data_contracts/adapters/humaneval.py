"""OpenAI's HumanEval as code tasks: functions to complete, with assertions. Other layouts are in ``layouts.py``."""

from __future__ import annotations

import json
from typing import Any

from rlcore.data_contracts.adapters.expressions import Row
from rlcore.data_contracts.adapters.fields import single_question, text

_COMPLETE = "Complete this Python function. Answer with the whole function in one fenced block of Python."
COLUMNS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")


def humaneval_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``prompt`` (signature and docstring), ``canonical_solution``, ``test``, ``entry_point``, ``task_id``."""
    prompt, entry_point = text(row, "prompt"), text(row, "entry_point")
    reference = {
        "style": "assert",
        "entry_point": entry_point,
        "prelude": prompt,  # its imports and helpers, which the tests of three tasks use
        "tests": [f"{text(row, 'test')}\ncheck(candidate)\n"],
        "solution": prompt + text(row, "canonical_solution"),
    }
    question = single_question(f"{_COMPLETE}\n```python\n{prompt.rstrip()}\n```")
    return [
        {
            "prompt_id": text(row, "task_id"),
            "messages": question,
            "reference": json.dumps(reference, ensure_ascii=False, sort_keys=True),
            "task": "humaneval",
        }
    ]
