"""Trial of reference answers before grading: each has to be a right answer itself under a reward that compares with it.

``proof`` and ``1/0`` grade no answer, and neither does the JSON of one verifier or a program under another verifier.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlcore.checks.canaries.known_answers import known_answer
from rlcore.config import RewardTerm
from rlcore.data_contracts.contracts.code_tasks import is_code_task
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.rewards.base import VERIFIERS
from rlcore.rewards.references import plain_error, reference_errors
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.tasks.presets.graph import FUNCTION, Graders
from rlcore.types import Message, Prompt, Rollout, is_correct

MAX_TRIED = 100_000
"""Number of formulas that a process tries, about two minutes; for others only the text is checked."""
_NO_ANSWER = "no answer can be graded with it"
_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assert, ast.Return)
_LOOPS = (ast.For, ast.While, ast.With, ast.Try, ast.If)
_COMMANDS = ("print", "input")


@contextmanager
def references_screen(graders: Graders) -> Iterator[RowFilter]:
    """Return a row filter against reference answers that grade no answer, each tried once.

    Raises:
        RewardError: the grader cannot be started.
    """
    known: dict[str, str] = {}
    yield lambda references: unusable(references, graders, known)


def unusable(references: Sequence[str], graders: Graders, known: dict[str, str]) -> Mapping[int, str]:
    """Return the reasons against reference answers that no grader of their dataset can use, by index.

    An empty one passes unless a reward has to score its answers. JSON passes if a custom function may read it.
    ``known`` caches earlier results and grows.
    """
    new = [each for each in dict.fromkeys(references) if each not in known]
    known.update(dict.fromkeys(new, ""))
    if graders.are_rewards:
        known.update({each: f"{_NO_ANSWER}, because it is empty" for each in new if not each.strip()})
    has_function = FUNCTION in graders.kinds
    left = [each for each in new if each.strip() and not (has_function and each.lstrip().startswith(("{", '["')))]
    found = [_REASONS[kind](left, len(known) - len(new)) for kind in VERIFIERS if kind in graders.kinds]
    for reference, *reasons in zip(left, *found, strict=True) if found else ():
        known[reference] = _NO_ANSWER + "; ".join(reasons) if all(reasons) else ""
    return {place: reason for place, each in enumerate(references) if (reason := known[each])}


def _math_reasons(references: Sequence[str], num_known: int) -> list[str]:
    found = {each: _foreign(each) for each in references}
    left = [each for each in references if not found[each]]
    tried, rest = left[: (bound := max(MAX_TRIED - num_known, 0))], left[bound:]
    errors = [*(reference_errors(tried) if tried else ()), *map(plain_error, rest)]
    found.update({each: error and f": it {error}" for each, error in zip(left, errors, strict=True)})
    return _with_own_scores("math", found)


def _procedural_reasons(references: Sequence[str], num_known: int) -> list[str]:
    found = {
        each: "" if _is_problem(each) else ", because it has no `dataset` and `entry` in JSON" for each in references
    }
    return _with_own_scores("procedural", found)


# The tests of code tasks are run by the screen of their contract.
def _code_reasons(references: Sequence[str], num_known: int) -> list[str]:
    return ["" if is_code_task(each) else ", because it is no JSON of a code task" for each in references]


_REASONS: Mapping[str, Callable[[Sequence[str], int], list[str]]] = {
    "math": _math_reasons,
    "procedural": _procedural_reasons,
    "code": _code_reasons,
}


def _with_own_scores(kind: str, found: Mapping[str, str]) -> list[str]:
    answers = {each: known_answer(_prompt(each)) for each, reason in found.items() if not reason}
    rollouts = [_answered(each, answer) for each, answer in answers.items() if answer not in (None, "None")]
    if not rollouts:
        return list(found.values())
    with build_rewards([RewardTerm(kind=kind)], resources=RewardResources()) as reward:
        wrong = {
            rollout.prompt.reference: f", because it is wrong as its own answer under the reward `{kind}`"
            for rollout, score in zip(rollouts, reward(rollouts), strict=True)
            if score.value is not None and not is_correct(score)  # time is no fault of the row
        }
    return list({**found, **wrong}.values())


def _prompt(reference: str) -> Prompt:
    question = (Message(role="user", content="?"),)
    return Prompt(prompt_id="?", messages=question, token_ids=(0,), reference=reference, task="?")


def _answered(reference: str, answer: str | None) -> Rollout:
    return Rollout(
        prompt=_prompt(reference),
        completion_ids=(0,),
        sampler_logprobs=(0.0,),
        loss_mask=(True,),
        policy_version=0,
        finish_reason="stop",
        text=f"<answer>{answer}</answer>",
    )


def _is_problem(reference: str) -> bool:
    found = _value(reference)
    return isinstance(found, dict) and isinstance(found.get("dataset"), str) and isinstance(found.get("entry"), dict)


def _foreign(reference: str) -> str:
    """Return what a reference is that ``math`` would compare word for word: JSON of another grader, a program."""
    text, found = reference.strip(), _value(reference)
    if text == "None":
        return ", because it is None"
    if isinstance(found, dict) or (isinstance(found, list) and any(isinstance(each, dict) for each in found)):
        return ", because it is an object of JSON or Python, which the reward `math` does not read"
    items = found if isinstance(found, list) else [text]
    is_code = bool(items) and all(isinstance(each, str) and _is_program(each) for each in items)
    return ", because it is a program or its tests, which the reward `math` does not read" if is_code else ""


def _value(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _is_program(text: str) -> bool:
    if text.lstrip().startswith("```"):
        return True
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            body = ast.parse(text).body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return any(isinstance(each, (*_STATEMENTS, *_LOOPS)) or _is_command(each) for each in body)


def _is_command(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in _COMMANDS
    return False
