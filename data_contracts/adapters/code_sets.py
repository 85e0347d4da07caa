"""Public sets of programming problems as code tasks.

HumanEval, LiveCodeBench, APPS, TACO, CodeContests, MBPP and KodCode. The private tests of LiveCodeBench are packed as a
pickled text, which is read from the pickle's opcodes; nothing is unpickled.
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlcore.data_contracts.adapters.expressions import Row, describe_missing
from rlcore.data_contracts.adapters.fields import items, single_question, text
from rlcore.data_contracts.adapters.mapping import row_id
from rlcore.data_contracts.errors import RowError

# Short, so that they alone are no words in a row that two prompts share.
SCRIPT = "Write a Python program, from standard input to output."
FUNCTION = "Write this Python function in a fenced block."
_COMPLETE = "Complete this Python {}. Answer with the whole {} in one fenced block of Python."
_READ_AND_PRINT = (
    "Write a Python program for this. It reads the standard input and prints the answer. Put it in one fenced block."
)
COLUMNS: Mapping[str, Collection[str]] = {
    "humaneval": ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    "livecodebench": (
        "question_id",
        "question_content",
        "starter_code",
        "public_test_cases",
        "private_test_cases",
        "metadata",
    ),
    "apps": ("question", "solutions", "input_output", "starter_code"),
    "code_contests": ("description", "public_tests", "private_tests", "generated_tests", "solutions"),
    "mbpp": ("text", "code", "test_list", "test_setup_code"),
    "kodcode": ("question", "solution", "test", "test_info"),
}
_ENTRY = re.compile(r"\bassert\s+(?:not\s+)?\(*\s*([A-Za-z_]\w*)\s*\(")
_IMPORTED = re.compile(r"^from solution import .*$", re.MULTILINE)
_MOST_BYTES = 64 << 20  # the limit of a sandbox
_OF_A_TEXT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}


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
    asked = f"{_COMPLETE.format('function', 'function')}\n{_fenced(prompt)}"
    return [_task(asked, reference, "humaneval", name=text(row, "task_id"))]


def livecodebench_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``question_id``, ``question_content``, ``starter_code``, both kinds of tests, and ``metadata``.

    A task is a script or a method of a class, without a solution.
    """
    starter, content = text(row, "starter_code"), text(row, "question_content")
    tests = [*_tests(row, "public_test_cases"), *_tests(row, "private_test_cases")]
    kinds = {str(test.get("testtype")) for test in tests}
    if kinds == {"stdin"}:
        asked = f"{_READ_AND_PRINT}\n\n{content}"
        reference = {"style": "stdin", "tests": [{"input": one["input"], "output": one["output"]} for one in tests]}
    elif kinds == {"functional"}:
        asked = f"{_COMPLETE.format('class', 'class')}\n{_fenced(starter)}\n\n{content}"
        reference = {"style": "call", "entry_point": _name(row), "tests": [_call(test) for test in tests]}
    else:
        raise RowError("public_test_cases", "must all be of one testtype, stdin or functional", sorted(kinds))
    return [_task(asked, reference, "livecodebench", name=text(row, "question_id"))]


def apps_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``question``, ``solutions`` and ``input_output``: JSON of ``inputs``, ``outputs`` and ``fn_name``."""
    found = _json(row, "input_output")
    if not isinstance(found, dict):
        raise RowError("input_output", "must be a JSON object with inputs and outputs", found)
    inputs, outputs, name = found.get("inputs"), found.get("outputs"), found.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise RowError("input_output", "must have as many outputs as inputs, and one or more", str(found)[:200])
    pairs = list(zip(inputs, outputs, strict=True))
    if not name:
        return [_script(text(row, "question"), pairs, "apps", **_solution(row))]
    tests = [{"args": _list(given), "output": _unwrapped(wanted)} for given, wanted in pairs]
    asked = f"{text(row, 'question')}\n\n{row.get('starter_code') or f'The function is {name}.'}"
    reference = {"style": "call", "entry_point": str(name), "tests": tests, **_solution(row)}
    return [_task(f"{FUNCTION}\n\n{asked.strip()}", reference, "apps")]


def _solution(row: Row) -> dict[str, str]:
    """Return the first solution, which must pass, if the row has some; a list, or JSON of one."""
    found = row.get("solutions")
    found = _json(row, "solutions") if isinstance(found, str) and found.strip() else found
    first = found[0] if isinstance(found, list) and found else ""
    return {"solution": first} if isinstance(first, str) and first.strip() else {}


def code_contests_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``description`` and the tests, objects with ``input`` and ``output``, lists of texts."""
    pairs: list[tuple[Any, Any]] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        found = row.get(name) or {}
        sides = [found.get(side) or [] for side in ("input", "output")] if isinstance(found, Mapping) else []
        if not sides or not all(isinstance(side, list) for side in sides) or len(sides[0]) != len(sides[1]):
            raise RowError(name, "must be an object with as many texts in input as in output", str(found)[:200])
        pairs += zip(*sides, strict=True)
    if "public_tests" not in row:
        raise RowError("public_tests", describe_missing("public_tests", list(row)))
    if not pairs:
        raise RowError("public_tests", "has no test, and neither have the other columns of tests")
    return [_script(text(row, "description"), pairs, "code_contests")]


def mbpp_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``text`` (or ``prompt``), ``code``, ``test_list``, assertions, and ``test_setup_code``."""
    asked, tests = text(row, "prompt" if "prompt" in row else "text").lstrip(), items(row, "test_list")
    if not all(isinstance(test, str) for test in tests):
        raise RowError("test_list", "must be a list of assertions, which are texts", tests)
    calls = [call[1] for test in tests for call in _ENTRY.finditer(test) if call[1] in text(row, "code")]
    if not calls:
        raise RowError("test_list", "asserts nothing of a function that the code defines", tests)
    reference = {
        "style": "assert",
        "entry_point": calls[0],
        "prelude": row.get("test_setup_code") or "\n".join(map(str, row.get("test_imports") or ())),
        "tests": tests,
        "solution": text(row, "code"),
    }
    shown = "\n".join(tests[:1])
    return [_task(f"{FUNCTION}\n\n{asked}\n\nIt passes this test:\n{shown}".strip(), reference, "mbpp")]


def kodcode_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``question``, ``solution``, ``test`` (functions of pytest) and ``test_info`` with its name."""
    solution, test = text(row, "solution"), _IMPORTED.sub("", text(row, "test"))
    try:
        tests = [node.name for node in ast.parse(test).body if isinstance(node, ast.FunctionDef) and _is_test(node)]
        defined = [node.name for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        raise RowError("test", f"test and solution must be Python: {error}", test) from error
    info = row.get("test_info")
    named = [each.get("function_name") for each in info or () if isinstance(each, Mapping)]
    entry = next((name for name in named if name in defined), defined[-1] if defined else "")
    if not tests or not entry:
        raise RowError("test", "must have functions test_…, and the solution a function that they call", test)
    reference = {
        "style": "assert",
        "entry_point": entry,
        "tests": [f"{test}\n{name}()\n" for name in tests],
        "solution": solution,
    }
    asked = f"{text(row, 'question').lstrip()}\n\nThe function is {entry}."
    return [_task(f"{FUNCTION}\n\n{asked}", reference, "kodcode")]


def _is_test(node: ast.FunctionDef) -> bool:
    return node.name.startswith("test") and not node.args.args


def _script(asked: str, pairs: Sequence[tuple[Any, Any]], task: str, **more: str) -> dict[str, Any]:
    tests = [{"input": _lines(given), "output": _lines(wanted)} for given, wanted in pairs]
    return _task(f"{SCRIPT}\n\n{asked.strip()}", {"style": "stdin", "tests": tests, **more}, task)


def _task(asked: str, reference: Mapping[str, Any], task: str, *, name: str | None = None) -> dict[str, Any]:
    question, spelled = single_question(asked), json.dumps(reference, ensure_ascii=False, sort_keys=True)
    found = row_id(task, question) if name is None else name
    return {"prompt_id": found, "messages": question, "reference": spelled, "task": task}


def _fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _json(row: Row, name: str) -> Any:
    value = text(row, name)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(name, f"is no JSON: {str(error)[:100]}", value[:200]) from error


def _lines(value: Any) -> str:
    """Return what a program reads or prints; some rows have a list of its lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else str(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unwrapped(value: Any) -> Any:
    """Return the value of a function; these sets have it in a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _tests(row: Row, name: str) -> list[dict[str, Any]]:
    value = text(row, name)
    try:
        tests = json.loads(value if value.lstrip().startswith("[") else _unpacked(value))
        if all(isinstance(test["input"], str) and isinstance(test["output"], str) for test in tests):
            return list(tests)
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise RowError(name, f"has no tests: {type(error).__name__}: {error}", value[:200]) from error
    raise RowError(name, "must be tests with an input and an output, both texts", value[:200])


def _unpacked(packed: str) -> str:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
    if not unpacker.eof:
        raise ValueError(f"more than {_MOST_BYTES} bytes, or cut off")
    codes = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    texts = [value for name, value in codes if name in _TEXT]
    if len(texts) != 1 or {name for name, _ in codes} - _OF_A_TEXT - _TEXT:
        raise ValueError("the pickle is not of one text")
    return str(texts[0])


def _name(row: Row) -> str:
    try:
        return str(json.loads(text(row, "metadata"))["func_name"])
    except (ValueError, TypeError, KeyError) as error:
        raise RowError("metadata", "must be a JSON object with func_name", row["metadata"]) from error


def _call(test: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            "args": [json.loads(line) for line in test["input"].splitlines() if line.strip()],
            "output": json.loads(test["output"]),
        }
    except ValueError as error:
        raise RowError("public_test_cases", "functional tests must be of JSON, an argument a line", test) from error
