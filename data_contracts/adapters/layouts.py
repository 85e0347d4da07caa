"""Table of public layouts: a mapping of columns for each kind of rows that they give. docs/layouts.md shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def _chat(column: str) -> dict[Kind, Columns]:
    asked = {"prompt": column, "system": "system?"}
    return {"prompts": asked, "demonstrations": asked}


def _problem(question: str, reference: str, *, solution: str = "") -> dict[Kind, Columns]:
    asked = {"prompt": question, "reference": reference}
    shown: dict[Kind, Columns] = {"demonstrations": {**asked, "completion": solution}} if solution else {}
    return {"prompts": asked, **shown}


_PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_INSTRUCTED = {"prompt": "{instruction}\n\n{input?}", "system": "system?", "history": "history?"}

LAYOUTS: Mapping[str, Layout] = {
    "alpaca": Layout(
        of="Alpaca",
        columns={
            "demonstrations": {**_INSTRUCTED, "completion": "output"},
            "prompts": _INSTRUCTED,
        },
    ),
    "alpaca_eval": Layout(
        of="AlpacaEval, annotated pairs",
        columns={
            "preferences": {**_PAIR, "id": "id", "source": "annotator"},
            "prompts": {"prompt": "prompt", "task": "=alpaca-eval"},
        },
    ),
    "arena": Layout(
        of="Chatbot Arena, conversations",
        columns={
            "preferences": {
                "response_a": "conversation_a",
                "response_b": "conversation_b",
                "winner": "winner",
                "winner_a": "=model_a",
                "winner_b": "=model_b",
            },
            "prompts": {"prompt": "conversation_a"},
        },
    ),
    "arena_55k": Layout(
        of="Chatbot Arena, 55k with JSON lists",
        columns={
            "preferences": {
                "prompt": "prompt|json",
                "response_a": "response_a|json|only",
                "response_b": "response_b|json|only",
                "score_a": "winner_model_a",
                "score_b": "winner_model_b",
            },
            "prompts": {"prompt": "prompt|json"},
        },
    ),
    "countdown": Layout(
        of="Countdown-Tasks (TinyZero)",
        columns={
            "prompts": {
                "prompt": "Make {target} from the numbers {nums|commas}, with + - * / and parentheses, and each number "
                "exactly once. End with the expression in answer tags, as in <answer> (1 + 2) / 3 </answer>.",
                "reference": '{{"dataset": "countdown", "entry": {{"question": "", "answer": null, "metadata": '
                '{{"numbers": [{nums|commas}], "target": {target}}}}}}}',
            }
        },
    ),
    "dapo": Layout(
        of="DAPO-Math",
        columns={
            "prompts": {
                "prompt": "prompt",
                "reference": "reward_model.ground_truth",
                "task": "=math_dapo",
            }
        },
    ),
    "gsm8k": Layout(of="GSM8K", columns=_problem("question", "answer|hashes", solution="answer|worked")),
    "helpsteer2": Layout(
        of="HelpSteer2, an answer a row",
        columns={
            "preferences": {"prompt": "prompt|extra_id", "completion": "response", "score": "helpfulness"},
            "demonstrations": {"prompt": "prompt|extra_id", "completion": "response"},
            "prompts": {"prompt": "prompt|extra_id"},
        },
    ),
    "helpsteer2_preference": Layout(
        of="HelpSteer2, preferences",
        columns={
            "preferences": {
                "prompt": "prompt|extra_id",
                "response_a": "response_1",
                "response_b": "response_2",
                "score_a": 0,
                "score_b": "preference_strength",
            }
        },
    ),
    "helpsteer3": Layout(
        of="HelpSteer3",
        columns={
            "preferences": {
                "prompt": "context",
                "response_a": "response1",
                "response_b": "response2",
                "score_a": 0,
                "score_b": "overall_preference",
            },
            "prompts": {"prompt": "context", "task": "domain"},
        },
    ),
    "hh": Layout(
        of="Anthropic's HH-RLHF",
        columns={
            "preferences": {"chosen": "chosen|transcript", "rejected": "rejected|transcript"},
            "prompts": {"prompt": "chosen|transcript"},
        },
    ),
    "lmsys_chat": Layout(of="LMSYS-Chat, WildChat", columns=_chat("conversation")),
    "math": Layout(
        of="MATH (Hendrycks)",
        columns={
            "prompts": {"prompt": "problem", "reference": "solution|boxed", "task": "type"},
            "demonstrations": {
                "prompt": "problem",
                "completion": "solution",
                "reference": "solution|boxed",
                "task": "type",
            },
        },
    ),
    "messages": Layout(of="bare `messages` (TRL, OpenAI)", columns=_chat("messages")),
    "mmlu": Layout(
        of="MMLU, questions with choices",
        columns={
            "prompts": {
                "prompt": "{question}\n\n{choices|letters}",
                "reference": "answer|letter",
                "task": "subject",
            }
        },
    ),
    "nectar": Layout(
        of="Nectar",
        columns={
            "preferences": {
                "prompt": "prompt|transcript",
                "responses": "answers.*.answer",
                "ranks": "answers.*.rank",
            },
            "prompts": {"prompt": "prompt|transcript"},
        },
    ),
    "numina_cot": Layout(
        of="NuminaMath-CoT",
        columns={
            "prompts": {"prompt": "problem", "reference": "solution|boxed", "task": "source"},
            "demonstrations": {
                "prompt": "problem",
                "completion": "solution",
                "task": "source",
            },
        },
    ),
    "oasst1": Layout(
        of="OpenAssistant, trees of messages",
        columns={
            "preferences": {"prompt": "messages", "responses": "ranked.*.text", "ranks": "ranked.*.rank"},
            "demonstrations": {"prompt": "messages", "completion": "replies.0.text"},
            "prompts": {"prompt": "messages"},
        },
        gather=gather_trees,
    ),
    "orca_pairs": Layout(
        of="Orca DPO pairs",
        columns={
            "preferences": {
                "system": "system?",
                "prompt": "question",
                "chosen": "chosen",
                "rejected": "rejected",
            }
        },
    ),
    "pku_saferlhf": Layout(
        of="PKU-SafeRLHF, by helpfulness",
        columns={
            "preferences": {
                "prompt": "prompt",
                "response_a": "response_0",
                "response_b": "response_1",
                "winner": "better_response_id?",
                "winner_a": 0,
                "winner_b": 1,
            }
        },
    ),
    "problems": Layout(
        of="DeepScaleR, AIME, MATH-500, NuminaMath-1.5",
        columns={"prompts": {"prompt": "problem", "reference": "answer"}},
    ),
    "rlvr": Layout(
        of="RLVR mixtures (Tülu 3, OLMo)",
        columns={"prompts": {"prompt": "messages", "reference": "ground_truth", "task": "dataset"}},
    ),
    "sharegpt": Layout(of="ShareGPT", columns=_chat("conversations")),
    "trl_kto": Layout(
        of="TRL unpaired preference (KTO)",
        columns={
            "preferences": {"prompt": "prompt", "completion": "completion", "score": "label"},
            "prompts": {"prompt": "prompt"},
        },
    ),
    "trl_preference": Layout(
        of="TRL preference, explicit prompt",
        columns={
            "preferences": {**_PAIR, "score_chosen": "score_chosen?", "score_rejected": "score_rejected?"},
            "prompts": {"prompt": "prompt"},
        },
    ),
    "trl_preference_implicit": Layout(
        of="TRL preference, implicit prompt",
        columns={"preferences": {"chosen": "chosen", "rejected": "rejected"}},
    ),
    "trl_prompt_completion": Layout(
        of="TRL prompt-completion",
        columns={
            "demonstrations": {"prompt": "prompt", "completion": "completion"},
            "prompts": {"prompt": "prompt"},
        },
    ),
    "trl_prompt_only": Layout(of="TRL prompt-only", columns={"prompts": {"prompt": "prompt"}}),
    "ultrafeedback": Layout(
        of="UltraFeedback (OpenBMB)",
        columns={
            "preferences": {
                "prompt": "instruction",
                "responses": "completions.*.response",
                "scores": "completions.*.overall_score",
            },
            "prompts": {"prompt": "instruction"},
        },
    ),
    "ultrafeedback_binarized": Layout(
        of="UltraFeedback binarized",
        columns={
            "preferences": {**_PAIR, "score_chosen": "score_chosen", "score_rejected": "score_rejected"},
            "prompts": {"prompt": "prompt"},
        },
    ),
    "verl": Layout(
        of="verl's Parquet files",
        columns={"prompts": {"prompt": "prompt", "reference": "reward_model.ground_truth", "task": "data_source"}},
    ),
}
"""Layouts by adapter name."""
