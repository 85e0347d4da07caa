"""Problems of reasoning-gym's seeded generators. Only this file imports it, and only on demand.

``reference`` is the input of the generator's scorer: ``{"dataset": …, "entry": {"question", "answer", "metadata"}}``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.data_contracts.adapters.fields import single_question
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.records import canonical_json
from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash

WORKED_TASK = "chain_sum"
_ENTRY_FIELDS = ("question", "answer", "metadata")
_RUNS_PROGRAMS = ("codeio",)  # tasks that run programs of the model with all rights of this user
_MAX_SHARE, _FEW = 0.9, 20  # share that one answer may solve; fewest problems for the check
_MAX_MISSES = 2_000  # consecutive problems that are known or on the full side of the split
_MANY = 10_000_000
_TERM = re.compile(r"([+-]?)\s*(-?\d+)")
Entry = dict[str, Any]


def generate_prompts(
    rng: random.Random, *, num_train: int, num_eval: int, tasks: str, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Generate rows of ``prompts/v1`` with different questions, alternating between ``tasks`` (comma-separated names).

    ``settings``: of the generators, by ``task.setting`` (``{"chain_sum.max_terms": 4}``).
    Raises:
        ContractError: unknown task or setting, or a generator with too few different problems.
    """
    return [
        {
            "prompt_id": name,
            "messages": single_question(entry["question"].strip()),
            "reference": _reference(task, entry),
            "task": task,
            "split": split,
        }
        for name, task, split, entry in _entries(rng, num_train, num_eval, tasks, settings)
    ]


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, tasks: str, settings: Mapping[str, Any], direct_share: float
) -> list[dict[str, Any]]:
    """Generate rows of ``demonstrations/v1``: ``#### answer``, preceded by steps for chain sums.

    A fraction ``direct_share`` of the chain sums has no steps.
    Raises:
        ContractError: as :func:`generate_prompts`.
    """
    return [
        {
            "demonstration_id": name,
            "messages": single_question(entry["question"].strip()),
            "completion": _completion(task, entry, is_direct=rng.random() < direct_share),
            "reference": _reference(task, entry),
            "task": task,
            "split": split,
        }
        for name, task, split, entry in _entries(rng, num_train, num_eval, tasks, settings)
    ]


def worked_sum(expression: str) -> str:
    """Return the running totals of a sum, one per line: ``4 - 1 - 7`` gives ``4 - 1 = 3``, ``3 - 7 = -4``.

    Raises:
        ValueError: not a sum of integers.
    """
    if not re.fullmatch(r"-?\d+(\s*[+-]\s*-?\d+)*", expression.strip()):
        raise ValueError(f"not a sum of integers: {expression!r}")
    first, *rest = _TERM.findall(expression.strip())
    total = int("".join(first))
    lines = []
    for operator, term in rest:
        result = total + int(term) if operator == "+" else total - int(term)
        lines.append(f"{total} {operator} {term} = {result}")
        total = result
    return "\n".join(lines)


def _completion(task: str, entry: Entry, *, is_direct: bool) -> str:
    final = f"#### {entry['answer']}"
    if task != WORKED_TASK or is_direct:
        return final
    return f"{worked_sum(entry['metadata']['expression'])}\n{final}"


def _entries(
    rng: random.Random, num_train: int, num_eval: int, tasks: str, settings: Mapping[str, Any]
) -> list[tuple[str, str, str, Entry]]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ContractError("no task is named", where="options.tasks", fix="name generators: tasks = 'chain_sum,gcd'")
    streams = []
    for place, name in enumerate(names):
        shares = {"train": _share(num_train, place, len(names)), "eval": _share(num_eval, place, len(names))}
        streams.append(list(_different_entries(name, rng.getrandbits(32), shares, _settings_of(name, settings))))
    for name, stream in zip(names, streams, strict=True):
        _refuse_a_constant(name, [str(entry["answer"]) for *_, entry in stream if entry["answer"] is not None])
    # Tasks alternate, so that any first part of the rows has all of them.
    turns = max(map(len, streams))
    return [stream[turn] for turn in range(turns) for stream in streams if turn < len(stream)]


def _refuse_a_constant(task: str, answers: Sequence[str]) -> None:
    answer, count = Counter(answers).most_common(1)[0] if answers else ("", 0)
    if len(answers) >= _FEW and count > _MAX_SHARE * len(answers):
        raise ContractError(
            f"{task}: one answer, {answer[:40]!r}, is right for {count} of {len(answers)} problems",
            where="options.tasks",
            fix="leave that task out, or make its problems more varied with its settings",
        )


def _share(total: int, place: int, parts: int) -> int:
    return total // parts + (place < total % parts)


def _settings_of(task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == task}


def _different_entries(
    task: str, seed: int, missing: dict[str, int], settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Entry]]:
    dataset = _create(task, seed, settings)
    seen: set[str] = set()
    misses = 0
    for index in range(_MANY):
        if not any(missing.values()):
            return
        if misses > _MAX_MISSES:
            raise ContractError(
                f"{task} has too few different problems: {missing} more are needed",
                where="options.tasks",
                fix="request fewer rows, or vary its problems with its settings",
            )
        entry = {name: dataset[index][name] for name in _ENTRY_FIELDS}
        digest = prompt_hash(single_question(entry["question"]))
        split = "eval" if is_held_out(digest) else "train"
        misses += 1
        if digest not in seen and missing[split]:
            seen.add(digest)
            missing[split] -= 1
            misses = 0
            yield f"{task}-{digest[:16]}", task, split, entry


def _create(task: str, seed: int, settings: Mapping[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    if task in _RUNS_PROGRAMS:
        raise ContractError(
            f"{task} runs programs that a model wrote, outside of any box",
            where="options.tasks",
            fix="leave that task out; for programs with tests there is the contract code_tasks",
        )
    try:
        return create_dataset(task, seed=seed, size=_MANY, **settings)
    except (ValueError, TypeError, AssertionError) as error:  # the generator's messages for unknown names and values
        raise ContractError(
            f"reasoning-gym cannot make {task!r}: {error}",
            where="options",
            fix="name a generator of reasoning-gym in tasks, and its settings as 'task.setting'",
        ) from error


def _reference(task: str, entry: Entry) -> str:
    try:
        return canonical_json({"dataset": task, "entry": entry}).decode()
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"the problems of {task} cannot be written as JSON: {error}",
            where="options.tasks",
            fix="leave that task out",
        ) from error
