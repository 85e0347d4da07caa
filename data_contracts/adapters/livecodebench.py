"""Rows of LiveCodeBench (code generation) as code tasks: scripts, and methods of a class, without solutions.

Their private tests are packed as a pickled text, which is read from the pickle's opcodes; nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from typing import Any

from rlcore.data_contracts.adapters.expressions import Row
from rlcore.data_contracts.adapters.fields import single_question, text
from rlcore.data_contracts.errors import RowError

COLUMNS = ("question_id", "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
_SCRIPT = (
    "Write a Python program for this. It reads the standard input and prints the answer. Put it in one fenced block."
)
_METHOD = "Complete this Python class. Answer with the whole class in one fenced block of Python."
_MOST_BYTES = 64 << 20  # the limit of a sandbox
_OF_A_TEXT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}


def livecodebench_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``question_id``, ``question_content``, ``starter_code``, both kinds of tests, and ``metadata``."""
    starter = text(row, "starter_code")
    tests = [*_tests(row, "public_test_cases"), *_tests(row, "private_test_cases")]
    kinds = {str(test.get("testtype")) for test in tests}
    if kinds == {"stdin"}:
        asked = f"{_SCRIPT}\n\n{text(row, 'question_content')}"
        reference = {"style": "stdin", "tests": [{"input": one["input"], "output": one["output"]} for one in tests]}
    elif kinds == {"functional"}:
        asked = f"{_METHOD}\n```python\n{starter.rstrip()}\n```\n\n{text(row, 'question_content')}"
        reference = {"style": "call", "entry_point": _name(row), "tests": [_call(test) for test in tests]}
    else:
        raise RowError("public_test_cases", "must all be of one testtype, stdin or functional", sorted(kinds))
    return [
        {
            "prompt_id": text(row, "question_id"),
            "messages": single_question(asked),
            "reference": json.dumps(reference, ensure_ascii=False, sort_keys=True),
            "task": "livecodebench",
        }
    ]


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
    """Unpack a text.

    Raises:
        ValueError, zlib.error: it is no packed text, or too long.
    """
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
