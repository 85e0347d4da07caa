"""Table of public layouts: a mapping of columns for each kind of rows that they give. docs/layouts.md shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from rlcore.data_contracts.adapters.expressions import Kind, Scalar
from rlcore.data_contracts.adapters.gathering import gather_trees
from rlcore.data_contracts.gate.reading import Source

Columns = Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Public layout: who has it, and its mappings.

    ``gather``: the source of the rows that the mappings read, if these are not the file's own.
    """

    of: str
    columns: Mapping[Kind, Columns]
    gather: Callable[[Source], Source] | None = None


def _layout(of: str, gather: Callable[[Source], Source] | None = None, **columns: Columns) -> Layout:
    return Layout(of=of, columns=cast(Mapping[Kind, Columns], columns), gather=gather)


def _sides(first: str, second: str, **others: Scalar) -> Columns:
    return {"response_a": first, "response_b": second, **others}


_PROMPT = {"prompt": "prompt"}
_PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_SCORED = {**_PAIR, "score_chosen": "score_chosen", "score_rejected": "score_rejected"}
_INSTRUCTED = {"prompt": "{instruction}\n\n{input?}", "system": "system?", "history": "history?"}
_BOXED = {"prompt": "problem", "reference": "solution|boxed"}
_TURNS = {"prompt": "prompt|extra_id"}
_CHATS = {name: {"prompt": name, "system": "system?"} for name in ("conversation", "conversations", "messages")}

LAYOUTS: Mapping[str, Layout] = {
    "alpaca": _layout("Alpaca", demonstrations={**_INSTRUCTED, "completion": "output"}, prompts=_INSTRUCTED),
    "alpaca_eval": _layout(
        "AlpacaEval, annotated pairs",
        preferences={**_PAIR, "id": "id", "source": "annotator"},
        prompts={"prompt": "prompt", "task": "=alpaca-eval"},
    ),
    "arena": _layout(
        "Chatbot Arena, conversations",
        preferences=_sides(
            "conversation_a", "conversation_b", winner="winner", winner_a="=model_a", winner_b="=model_b"
        ),
        prompts={"prompt": "conversation_a"},
    ),
    "arena_55k": _layout(
        "Chatbot Arena, 55k with JSON lists",
        preferences={
            "prompt": "prompt|json",
            **_sides("response_a|json|only", "response_b|json|only"),
            "score_a": "winner_model_a",
            "score_b": "winner_model_b",
        },
        prompts={"prompt": "prompt|json"},
    ),
    "countdown": _layout(
        "Countdown-Tasks (TinyZero)",
        prompts={
            "prompt": "Make {target} from the numbers {nums|commas}, with + - * / and parentheses, and each number "
            "exactly once. End with the expression in answer tags, as in <answer> (1 + 2) / 3 </answer>.",
            "reference": '{{"dataset": "countdown", "entry": {{"question": "", "answer": null, "metadata": '
            '{{"numbers": [{nums|commas}], "target": {target}}}}}}}',
        },
    ),
    "dapo": _layout(
        "DAPO-Math", prompts={"prompt": "prompt", "reference": "reward_model.ground_truth", "task": "=math_dapo"}
    ),
    "gsm8k": _layout(
        "GSM8K",
        prompts={"prompt": "question", "reference": "answer|hashes"},
        demonstrations={"prompt": "question", "reference": "answer|hashes", "completion": "answer|worked"},
    ),
    "helpsteer2": _layout(
        "HelpSteer2, an answer a row",
        preferences={**_TURNS, "completion": "response", "score": "helpfulness"},
        demonstrations={**_TURNS, "completion": "response"},
        prompts=_TURNS,
    ),
    "helpsteer2_preference": _layout(
        "HelpSteer2, preferences",
        preferences={**_TURNS, **_sides("response_1", "response_2", score_a=0, score_b="preference_strength")},
    ),
    "helpsteer3": _layout(
        "HelpSteer3",
        preferences={
            "prompt": "context",
            **_sides("response1", "response2", score_a=0, score_b="overall_preference"),
        },
        prompts={"prompt": "context", "task": "domain"},
    ),
    "hh": _layout(
        "Anthropic's HH-RLHF",
        preferences={"chosen": "chosen|transcript", "rejected": "rejected|transcript"},
        prompts={"prompt": "chosen|transcript"},
    ),
    "lmsys_chat": _layout(
        "LMSYS-Chat, WildChat", prompts=_CHATS["conversation"], demonstrations=_CHATS["conversation"]
    ),
    "math": _layout(
        "MATH (Hendrycks)",
        prompts={**_BOXED, "task": "type"},
        demonstrations={"prompt": "problem", "completion": "solution", "reference": "solution|boxed", "task": "type"},
    ),
    "messages": _layout("bare `messages` (TRL, OpenAI)", prompts=_CHATS["messages"], demonstrations=_CHATS["messages"]),
    "mmlu": _layout(
        "MMLU, questions with choices",
        prompts={"prompt": "{question}\n\n{choices|letters}", "reference": "answer|letter", "task": "subject"},
    ),
    "nectar": _layout(
        "Nectar",
        preferences={"prompt": "prompt|transcript", "responses": "answers.*.answer", "ranks": "answers.*.rank"},
        prompts={"prompt": "prompt|transcript"},
    ),
    "numina_cot": _layout(
        "NuminaMath-CoT",
        prompts={**_BOXED, "task": "source"},
        demonstrations={"prompt": "problem", "completion": "solution", "task": "source"},
    ),
    "oasst1": _layout(
        "OpenAssistant, trees of messages",
        gather=gather_trees,
        preferences={"prompt": "messages", "responses": "ranked.*.text", "ranks": "ranked.*.rank"},
        demonstrations={"prompt": "messages", "completion": "replies.0.text"},
        prompts={"prompt": "messages"},
    ),
    "orca_pairs": _layout(
        "Orca DPO pairs",
        preferences={"system": "system?", "prompt": "question", "chosen": "chosen", "rejected": "rejected"},
    ),
    "pku_saferlhf": _layout(
        "PKU-SafeRLHF, by helpfulness",
        preferences={
            "prompt": "prompt",
            **_sides("response_0", "response_1", winner="better_response_id?", winner_a=0, winner_b=1),
        },
    ),
    "problems": _layout(
        "DeepScaleR, AIME, MATH-500, NuminaMath-1.5", prompts={"prompt": "problem", "reference": "answer"}
    ),
    "rlvr": _layout(
        "RLVR mixtures (Tülu 3, OLMo)", prompts={"prompt": "messages", "reference": "ground_truth", "task": "dataset"}
    ),
    "sharegpt": _layout("ShareGPT", prompts=_CHATS["conversations"], demonstrations=_CHATS["conversations"]),
    "trl_kto": _layout(
        "TRL unpaired preference (KTO)",
        preferences={"prompt": "prompt", "completion": "completion", "score": "label"},
        prompts=_PROMPT,
    ),
    "trl_preference": _layout(
        "TRL preference, explicit prompt",
        preferences={**_PAIR, "score_chosen": "score_chosen?", "score_rejected": "score_rejected?"},
        prompts=_PROMPT,
    ),
    "trl_preference_implicit": _layout(
        "TRL preference, implicit prompt", preferences={"chosen": "chosen", "rejected": "rejected"}
    ),
    "trl_prompt_completion": _layout(
        "TRL prompt-completion", demonstrations={"prompt": "prompt", "completion": "completion"}, prompts=_PROMPT
    ),
    "trl_prompt_only": _layout("TRL prompt-only", prompts=_PROMPT),
    "ultrafeedback": _layout(
        "UltraFeedback (OpenBMB)",
        preferences={
            "prompt": "instruction",
            "responses": "completions.*.response",
            "scores": "completions.*.overall_score",
        },
        prompts={"prompt": "instruction"},
    ),
    "ultrafeedback_binarized": _layout("UltraFeedback binarized", preferences=_SCORED, prompts=_PROMPT),
    "verl": _layout(
        "verl's Parquet files",
        prompts={"prompt": "prompt", "reference": "reward_model.ground_truth", "task": "data_source"},
    ),
}
"""Layouts by adapter name."""
