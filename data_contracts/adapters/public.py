"""Adapters of public datasets: one small pure function per dataset and kind, from source row to contract rows.

Each returns rows without ``split`` (divided by prompt later) and raises ``RowError`` for an invalid source row. Formats
as published: AlpacaEval (annotated pairs), GSM8K, DeepScaleR and AIME (problems with an answer), Anthropic's HH-RLHF,
UltraFeedback (OpenBMB, and binarized by HuggingFaceH4), OpenAI's HumanEval.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from rlcore.data_contracts.adapters.fields import Messages, Row, items, messages, number, single_question, text
from rlcore.data_contracts.contracts.preference_pairs import single
from rlcore.data_contracts.contracts.ranked_sets import expand
from rlcore.data_contracts.errors import RowError

_COMPLETE = "Complete this Python function. Answer with the whole function in one fenced block of Python."
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def alpaca_eval_pairs(row: Row) -> list[dict[str, Any]]:
    """Convert ``id``, ``prompt``, ``chosen``, ``rejected``, ``annotator``."""
    sides = {"chosen": text(row, "chosen"), "rejected": text(row, "rejected")}
    return [_pair(text(row, "id"), single_question(text(row, "prompt")), sides, source=text(row, "annotator"))]


def alpaca_eval_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert the instructions alone, to score answers with a reward model; rows of one instruction are merged."""
    return [_prompt("alpaca-eval", single_question(text(row, "prompt")))]


def gsm8k_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``question``, and the number after ``####`` in ``answer`` as the reference answer."""
    return [_prompt("gsm8k", single_question(text(row, "question")), reference=_gsm8k_solution(row)[1])]


def problem_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert ``problem`` and ``answer`` (a number or LaTeX) of DeepScaleR, AIME, MATH-500."""
    return [_prompt("problems", single_question(text(row, "problem")), reference=text(row, "answer"))]


def gsm8k_demonstrations(row: Row) -> list[dict[str, Any]]:
    """Convert the solution without its calculator notes ``<<48/2=24>>``, and the number after ``####``."""
    question = single_question(text(row, "question"))
    solution, reference = _gsm8k_solution(row)
    return [
        {
            "demonstration_id": _row_id("gsm8k", question),
            "messages": question,
            "completion": f"{solution}\n#### {reference}",
            "reference": reference,
            "task": "gsm8k",
        }
    ]


def hh_pairs(row: Row) -> list[dict[str, Any]]:
    """Convert two transcripts, ``chosen`` and ``rejected``, which differ only in the assistant's last turn."""
    context, chosen = _transcript(row, "chosen")
    other_context, rejected = _transcript(row, "rejected")
    if context != other_context:
        raise RowError("rejected", "does not share its context with 'chosen'", text(row, "rejected"))
    sides = {"chosen": chosen, "rejected": rejected}
    return [_pair(_row_id("hh", context, chosen, rejected), context, sides, source="hh")]


def hh_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert the shared context of the two transcripts."""
    return [_prompt("hh", _transcript(row, "chosen")[0])]


def ultrafeedback_pairs(row: Row) -> list[dict[str, Any]]:
    """Convert ``instruction`` and ``completions`` with ``response`` and ``overall_score``: a ranking, as pairs."""
    question = single_question(text(row, "instruction"))
    answers = items(row, "completions")
    for place, answer in enumerate(answers):
        if not isinstance(answer, dict):
            raise RowError(f"completions.{place}", "must be an object", answer)
    scores = [number(answer, "overall_score") for answer in answers]
    ranks = [sum(other > score for other in scores) for score in scores]
    responses = [text(answer, "response") for answer in answers]
    return expand(_row_id("ultrafeedback", question), question, responses, ranks, source="ultrafeedback")


def ultrafeedback_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert the instructions alone."""
    return [_prompt("ultrafeedback", single_question(text(row, "instruction")))]


def ultrafeedback_binarized_pairs(row: Row) -> list[dict[str, Any]]:
    """Convert ``chosen`` and ``rejected`` as conversations that end with the assistant's answer."""
    (*context, chosen), (*other_context, rejected) = _ended(row, "chosen"), _ended(row, "rejected")
    if context != other_context:
        raise RowError("rejected", "does not share its context with 'chosen'", other_context)
    sides = {"chosen": chosen["content"], "rejected": rejected["content"]}
    name = _row_id("ultrafeedback", context, *sides.values())
    return [_pair(name, context, sides, source="ultrafeedback_binarized")]


def ultrafeedback_binarized_prompts(row: Row) -> list[dict[str, Any]]:
    """Convert the conversation before the assistant's answer."""
    return [_prompt("ultrafeedback", _ended(row, "chosen")[:-1])]


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


def _prompt(task: str, question: Messages, *, reference: str = "") -> dict[str, Any]:
    name = _row_id(task, question)
    return {"prompt_id": name, "messages": question, "reference": reference, "task": task}


def _pair(name: str, question: Messages, sides: dict[str, str], *, source: str) -> dict[str, Any]:
    return {**single(name), "messages": question, **sides, "source": source}


def _row_id(dataset: str, question: Messages, *answers: str) -> str:
    """Return an id derived from the content, for datasets whose rows have none."""
    turns = [f"{turn['role']}\n{turn['content']}" for turn in question]
    return f"{dataset}-{hashlib.sha256(chr(0).join([*turns, *answers]).encode()).hexdigest()[:16]}"


def _gsm8k_solution(row: Row) -> tuple[str, str]:
    answer = text(row, "answer")
    solution, marker, reference = answer.rpartition("####")
    if not marker or not reference.strip():
        raise RowError("answer", "has no final answer after '####'", answer[-200:])
    return _CALCULATOR.sub("", solution).strip(), reference.strip().replace(",", "")


def _transcript(row: Row, name: str) -> tuple[Messages, str]:
    r"""Split ``\n\nHuman: …\n\nAssistant: …`` into the conversation before the last answer, and that answer."""
    before, *parts = _TURN.split(text(row, name))
    if before.strip() or len(parts) < 4:
        raise RowError(name, "is no transcript of Human and Assistant", text(row, name))
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"role": roles[speaker], "content": words.strip()}
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns[-1]["role"] != "assistant":
        raise RowError(name, "does not end with an Assistant turn", text(row, name)[-200:])
    return turns[:-1], turns[-1]["content"]


def _ended(row: Row, name: str) -> Messages:
    turns = messages(row, name)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise RowError(name, "does not end with an assistant's answer", turns[-1:])
    return turns
