"""Rows in the layouts of public data, in words of our own: a function of a number for each layout and variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.data_contracts.adapters.expressions import Kind

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """Layout's rows by number, of which the first kind of the adapter gives ``first`` for number 7."""

    adapter: str
    rows: Callable[[int], list[Row]]
    first: Mapping[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def bot(text: str) -> Row:
    return {"role": "assistant", "content": text}


def asked(number: int) -> str:
    return f"What is {number} plus {number * number}, counted in pebbles?"


def good(number: int) -> str:
    return f"It is {number + number * number} pebbles."


def bad(number: int) -> str:
    return f"Perhaps {number + 1}, or so."


PAIR = {"messages": [user(asked(7))], "chosen": good(7), "rejected": bad(7)}
SUM = {"messages": [user(asked(7))], "reference": "56"}
DEMONSTRATION = {"messages": [user(asked(7))], "completion": good(7)}


def _oasst(number: int) -> list[Row]:
    def message(name: str, parent: str | None, role: str, text: str, rank: float | None) -> Row:
        tree = {"message_tree_id": f"{number}-a", "lang": "en", "deleted": False, "labels": None}
        return {"message_id": name, "parent_id": parent, "role": role, "text": text, "rank": rank, **tree}

    root = f"{number}-a"
    return [
        message(root, None, "prompter", asked(number), None),
        message(f"{number}-b", root, "assistant", bad(number), 1.0),
        message(f"{number}-c", root, "assistant", good(number), 0.0),
    ]


def _steer(number: int) -> list[Row]:
    marks = {"correctness": 3, "coherence": 4, "complexity": 1, "verbosity": 1}
    sides = ((bad(number), 1), (good(number), 4))
    return [{"prompt": asked(number), "response": text, "helpfulness": mark, **marks} for text, mark in sides]


def _arena(number: int) -> Row:
    talks = {f"conversation_{side}": [user(asked(number)), bot(text(number))] for side, text in _SIDES}
    return {"question_id": f"q{number}", "model_a": "m", "model_b": "n", "winner": "model_b", "judge": "j", **talks}


_SIDES = (("a", bad), ("b", good))


def _arena_55k(number: int) -> Row:
    texts = {f"response_{side}": json.dumps([text(number)]) for side, text in _SIDES}
    wins = {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}
    return {"id": number, "model_a": "m", "model_b": "n", "prompt": json.dumps([asked(number)]), **texts, **wins}


def _pku(number: int) -> Row:
    texts = {"response_0": bad(number), "response_1": good(number)}
    safe = {"is_response_0_safe": True, "is_response_1_safe": True, "safer_response_id": 0}
    return {"prompt": asked(number), "prompt_source": "own", **texts, **safe, "better_response_id": 1}


def _verl(number: int, source: str) -> Row:
    return {
        "data_source": source,
        "prompt": [user(asked(number))],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + number * number)},
        "extra_info": {"split": "train", "index": number},
    }


def _math(number: int) -> Row:
    solution = rf"We add them and get $\boxed{{{number + number * number}}}$ pebbles."
    return {"problem": asked(number), "level": "Level 1", "type": "Counting", "solution": solution}


def _numina(number: int) -> Row:
    solution = _math(number)["solution"]
    talk = [user(asked(number)), bot(solution)]
    return {"source": "own", "problem": asked(number), "solution": solution, "messages": talk}


def _nectar(number: int) -> Row:
    answers = [
        {"answer": bad(number), "model": "m", "rank": 2.0},
        {"answer": good(number), "model": "n", "rank": 1.0},
    ]
    return {"prompt": f"\n\nHuman: {asked(number)}\n\nAssistant: ", "answers": answers, "turns": 1, "source": ["own"]}


def _kto(number: int) -> list[Row]:
    return [
        {"prompt": asked(number), "completion": text, "label": label}
        for text, label in ((good(number), True), (bad(number), False))
    ]


def _hh(number: int) -> Row:
    before = f"\n\nHuman: {asked(number)}\n\nAssistant: "
    return {"chosen": before + good(number), "rejected": before + bad(number)}


def _gsm8k(number: int) -> Row:
    found = number + number * number
    return {"question": asked(number), "answer": f"{number} and {number * number} are <<1+1=2>>{found}.\n#### {found}"}


def _ultra(number: int) -> Row:
    answers = [
        {"response": bad(number), "overall_score": 3.5, "model": "m"},
        {"response": good(number), "overall_score": 8.0, "model": "n"},
    ]
    return {"source": "own", "instruction": asked(number), "models": ["m", "n"], "completions": answers}


def _binarized(number: int) -> Row:
    sides = {"chosen": [user(asked(number)), bot(good(number))], "rejected": [user(asked(number)), bot(bad(number))]}
    return {"prompt": asked(number), "prompt_id": f"p{number}", **sides, "score_chosen": 8.0, "score_rejected": 3.5}


def _one(adapter: str, row: Callable[[int], Row], first: Mapping[str, Any]) -> Example:
    return Example(adapter=adapter, rows=lambda number: [row(number)], first=first)


EXAMPLES: Mapping[str, Example] = {
    "HelpSteer2": Example(adapter="helpsteer2", rows=_steer, first=PAIR),
    "HelpSteer2 preferences": _one(
        "helpsteer2_preference",
        lambda n: {
            "split": "train",
            "prompt": asked(n),
            "response_1": bad(n),
            "response_2": good(n),
            "preference_strength": 2,
        },
        PAIR,
    ),
    "HelpSteer3": _one(
        "helpsteer3",
        lambda n: {
            "domain": "general",
            "language": "english",
            "context": [user(asked(n))],
            "response1": good(n),
            "response2": bad(n),
            "overall_preference": -3,
        },
        PAIR,
    ),
    "Nectar": _one("nectar", _nectar, PAIR),
    "oasst1": Example(adapter="oasst1", rows=_oasst, first=PAIR),
    "PKU-SafeRLHF": _one("pku_saferlhf", _pku, PAIR),
    "Chatbot Arena": _one("arena", _arena, PAIR),
    "Chatbot Arena 55k": _one("arena_55k", _arena_55k, PAIR),
    "Orca DPO pairs": _one(
        "orca_pairs",
        lambda n: {"system": "Be kind.", "question": asked(n), "chosen": good(n), "rejected": bad(n)},
        {**PAIR, "messages": [{"role": "system", "content": "Be kind."}, user(asked(7))]},
    ),
    "UltraFeedback": _one("ultrafeedback", _ultra, PAIR),
    "UltraFeedback binarized": _one("ultrafeedback_binarized", _binarized, PAIR),
    "AlpacaEval": _one(
        "alpaca_eval",
        lambda n: {"id": f"a{n}", "prompt": asked(n), "chosen": good(n), "rejected": bad(n), "annotator": "someone"},
        {**PAIR, "pair_id": "a7", "source": "someone"},
    ),
    "HH-RLHF": _one("hh", _hh, PAIR),
    "TRL preference, texts": _one(
        "trl_preference", lambda n: {"prompt": asked(n), "chosen": good(n), "rejected": bad(n)}, PAIR
    ),
    "TRL preference, conversations": _one(
        "trl_preference",
        lambda n: {"prompt": [user(asked(n))], "chosen": [bot(good(n))], "rejected": [bot(bad(n))]},
        PAIR,
    ),
    "TRL preference, implicit prompt": _one(
        "trl_preference_implicit",
        lambda n: {"chosen": [user(asked(n)), bot(good(n))], "rejected": [user(asked(n)), bot(bad(n))]},
        PAIR,
    ),
    "TRL preference, implicit prompt in texts": _one(
        "trl_preference_implicit",
        lambda n: {"chosen": f"Pebble {n} is grey.", "rejected": f"Pebble {n} is green."},
        {"messages": [user("Pebble 7 is")], "chosen": "grey.", "rejected": "green."},
    ),
    "TRL unpaired preference (KTO)": Example(adapter="trl_kto", rows=_kto, first=PAIR),
    "TRL prompt-only, text": _one("trl_prompt_only", lambda n: {"prompt": asked(n)}, {**SUM, "reference": ""}),
    "TRL prompt-only, conversation": _one(
        "trl_prompt_only", lambda n: {"prompt": [user(asked(n))]}, {**SUM, "reference": ""}
    ),
    "TRL prompt-completion": _one(
        "trl_prompt_completion", lambda n: {"prompt": asked(n), "completion": good(n)}, DEMONSTRATION
    ),
    "DAPO": _one("dapo", lambda n: _verl(n, "math_dapo"), {**SUM, "task": "math_dapo"}),
    "verl": _one("verl", lambda n: _verl(n, "openai/gsm8k"), {**SUM, "task": "openai/gsm8k"}),
    "RLVR mixture": _one(
        "rlvr",
        lambda n: {"messages": [user(asked(n))], "ground_truth": str(n + n * n), "dataset": "gsm"},
        {**SUM, "task": "gsm"},
    ),
    "Countdown": _one("countdown", lambda n: {"target": n + 20, "nums": [n, 20, 3]}, {"task": "countdown"}),
    "GSM8K": _one("gsm8k", _gsm8k, SUM),
    "MATH": _one("math", _math, {**SUM, "task": "Counting"}),
    "NuminaMath-CoT": _one("numina_cot", _numina, {**SUM, "task": "own"}),
    "DeepScaleR, AIME": _one("problems", lambda n: {"problem": asked(n), "answer": n + n * n, "solution": "…"}, SUM),
    "MMLU": _one(
        "mmlu",
        lambda n: {"question": asked(n), "subject": "pebbles", "choices": [bad(n), good(n)], "answer": 1},
        {"reference": "B", "task": "pebbles"},
    ),
    "LMSYS-Chat": _one(
        "lmsys_chat",
        lambda n: {"conversation_id": f"c{n}", "model": "m", "conversation": [user(asked(n)), bot(good(n))], "turn": 1},
        {**SUM, "reference": ""},
    ),
    "Alpaca": _one(
        "alpaca", lambda n: {"instruction": asked(n), "input": "", "output": good(n), "text": "…"}, DEMONSTRATION
    ),
    "Alpaca with a history": _one(
        "alpaca",
        lambda n: {"instruction": asked(n), "input": "", "output": good(n), "history": [["Hello", "Hi"]]},
        {**DEMONSTRATION, "messages": [user("Hello"), bot("Hi"), *SUM["messages"]]},
    ),
    "ShareGPT": _one(
        "sharegpt",
        lambda n: {
            "id": f"s{n}",
            "conversations": [{"from": "human", "value": asked(n)}, {"from": "gpt", "value": good(n)}],
        },
        {**SUM, "reference": ""},
    ),
    "bare messages": _one(
        "messages", lambda n: {"messages": [user(asked(n)), {**bot(good(n)), "name": None}]}, {**SUM, "reference": ""}
    ),
}
KINDS: tuple[Kind, ...] = ("prompts", "demonstrations", "preferences")
