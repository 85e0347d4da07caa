"""The tests mirror the tree: a module has tests under its own path, or is listed with those that drive it.

A module without a function says what is, and has nothing to test.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source_files import ROOT, modules

PACKAGES = ("rlcore/", "tasks/", "flows/", "data_contracts/", "examples/")

# By the test, below tests/: parts of what it tests as a whole. A flow's test runs steps, pages and flows in order.
DRIVEN_BY = {
    "data_contracts/adapters/test_table": (
        "data_contracts/adapters/convert",
        "data_contracts/adapters/fields",
        "data_contracts/adapters/public",
    ),
    "data_contracts/contracts/test_contracts": (
        "data_contracts/contracts/demonstrations",
        "data_contracts/contracts/evaluations",
        "data_contracts/contracts/preference_pairs",
        "data_contracts/contracts/prompts",
        "data_contracts/contracts/ranked_sets",
        "data_contracts/contracts/rollouts",
        "data_contracts/errors",
    ),
    "data_contracts/gate/test_data_gate": (
        "data_contracts/gate/cross_row_checks",
        "data_contracts/gate/kept_rows",
        "data_contracts/gate/lookup",
        "data_contracts/gate/records",
        "data_contracts/gate/report",
        "data_contracts/gate/row_hashes",
        "data_contracts/gate/row_rules",
        "data_contracts/gate/row_summary",
        "data_contracts/gate/rules",
        "data_contracts/gate/scan",
        "data_contracts/gate/token_budget",
    ),
    "data_contracts/gate/test_reading": ("data_contracts/gate/strict_json",),
    "examples/test_arithmetic": ("examples/generated",),
    "examples/test_stock_environment": ("examples/environments",),
    "flows/command/test_app": (
        "flows/command/machine",
        "flows/command/models",
        "flows/command/servers",
        "flows/command/settings",
    ),
    "rlcore/canaries/test_rewards": ("rlcore/canaries/known_answers",),
    "rlcore/rewards/test_answers": ("rlcore/rewards/last_number",),
    "rlcore/rewards/test_math_kinds": tuple(
        f"rlcore/rewards/mathematics/{name}"
        for name in (
            "equality",
            "formula",
            "lists",
            "notations",
            "numeric_values",
            "reader",
            "reading",
            "real_sets",
            "relations",
            "residues",
            "spelling",
            "splitting",
        )
    ),
    "rlcore/rewards/test_math_worked_out": ("rlcore/rewards/left_to_do", "rlcore/rewards/mathematics/worked_out"),
    "flows/test_post_train": (
        "flows/compare",
        "flows/evaluate",
        "flows/import_sft",
        "flows/online_rl",
        "flows/prepare_data",
        "flows/reward_model",
        "flows/run",
        "flows/sft",
        "tasks/steps/compare",
        "tasks/steps/evaluate",
        "tasks/steps/import_sft",
        "tasks/steps/prepare_sampled",
        "tasks/steps/sft",
    ),
    "flows/test_dpo": ("tasks/steps/dpo",),
    "flows/test_curriculum": ("data_contracts/contracts/difficulties", "tasks/report/difficulty_page"),
    "flows/test_skills": ("tasks/report/benchmark_page",),
    "flows/test_win_rate": (
        "tasks/report/win_rate_page",
        "tasks/steps/win_rate",
    ),
    "flows/test_presets": ("flows/kinds", "flows/stages"),
    "flows/test_promote": (
        "flows/rollback",
        "tasks/steps/promote",
        "tasks/steps/promotion_figures",
    ),
    "flows/test_report": (
        "tasks/report/outcome",
        "tasks/report/run_data",
        "tasks/report/run_page",
        "tasks/report/summary",
        "tasks/report/training_pages",
    ),
    "flows/test_reproduce": ("tasks/pipeline/reproduce",),
    "flows/test_retrain": ("tasks/pipeline/events", "tasks/tracking/past"),
    "flows/test_placement": ("tasks/steps/ranks",),
    "flows/test_stage_code": ("tasks/steps/recipe",),
    "rlcore/cluster/test_samplers": (
        "rlcore/cluster/host",
        "rlcore/cluster/ranks",
        "rlcore/cluster/sampler_role",
        "rlcore/cluster/scorer_role",
        "rlcore/cluster/scorers",
    ),
    "rlcore/loop/test_iteration": (
        "rlcore/training/local",
        "rlcore/loop/health",
        "rlcore/loop/run",
    ),
    "rlcore/models/test_half_precision": ("rlcore/models/precision",),
    "rlcore/models/test_importing_gguf": ("rlcore/models/gguf",),
    "rlcore/models/test_lora": ("rlcore/models/adapter_targets",),
    "rlcore/models/test_importing": ("rlcore/models/starting_tokenizer",),
    "rlcore/rewards/test_grader_pool": ("rlcore/rewards/grader_process",),
    "rlcore/rewards/test_judge": ("rlcore/rewards/chat_endpoint", "rlcore/rewards/control_words"),
    "rlcore/rewards/test_math_verdicts": ("rlcore/rewards/math_verifier", "rlcore/rewards/units"),
    "rlcore/rewards/test_mix": ("rlcore/rewards/__init__", "rlcore/rewards/base"),
    "rlcore/rewards/test_pair_judge": ("rlcore/rewards/pair_endpoint", "rlcore/rewards/pairs"),
    "rlcore/rewards/test_procedural": ("rlcore/rewards/procedural_scorer",),
    "rlcore/rewards/test_table": ("rlcore/rewards/regex_matcher", "rlcore/rewards/user_function"),
    "rlcore/sampling/test_scripted": ("rlcore/sampling/base",),
    "rlcore/sampling/vllm/test_server": (
        "rlcore/sampling/vllm/client",
        "rlcore/sampling/vllm/metrics",
        "rlcore/sampling/vllm/process",
        "rlcore/sampling/vllm/requests",
    ),
    "rlcore/sampling/vllm/test_transfer": ("rlcore/sampling/vllm/worker/gloo",),
    "rlcore/sandbox/test_attacks": ("rlcore/sandbox/runner", "rlcore/sandbox/supervisor"),
    "rlcore/sandbox/test_pool": ("rlcore/sandbox/base", "rlcore/sandbox/box", "rlcore/sandbox/walls"),
    "rlcore/sandbox/test_suite": ("rlcore/sandbox/judge",),
    "rlcore/rewards/test_honest_programs": ("rlcore/sandbox/script",),
    "rlcore/test_public": ("rlcore/__init__", "rlcore/loop/native"),
    "rlcore/test_tokenization": ("rlcore/models/scratch",),
    "rlcore/tools/test_python": ("rlcore/tools/table",),
    "rlcore/audit/test_audit": ("rlcore/audit/standing",),
    "rlcore/audit/test_belonging": ("rlcore/audit/draws",),
    "rlcore/audit/test_compare": ("rlcore/audit/finding",),
    "rlcore/audit/test_second_pass": (
        "rlcore/audit/drawn_numbers",
        "rlcore/audit/formula",
        "rlcore/audit/passes",
    ),
    "rlcore/audit/test_steps": ("rlcore/audit/numbers",),
    "rlcore/training/test_reward_fit": ("rlcore/training/label_audit",),
    "rlcore/training/test_supervised_ranks": ("rlcore/training/reward_learner",),
    "tasks/preset/test_graph": ("tasks/preset/faults", "tasks/preset/judging_faults", "tasks/preset/stages"),
    "tasks/preset/test_run": (
        "rlcore/config/data",
        "rlcore/config/engine",
        "rlcore/config/episodes",
        "rlcore/config/benchmark",
        "rlcore/config/health",
        "rlcore/config/rejection",
        "rlcore/config/rl",
        "rlcore/config/training",
        "rlcore/config/win_rate",
        "tasks/preset/data",
        "tasks/preset/evaluation",
        "tasks/preset/retrain",
    ),
    "tasks/pipeline/test_stages": ("tasks/steps/base",),
    "tasks/serving/test_limits": ("tasks/serving/engine", "tasks/serving/guard"),
    "tasks/serving/test_malformed": ("tasks/serving/errors", "tasks/serving/requests", "tasks/serving/server"),
    "tasks/serving/test_openai_client": ("tasks/serving/front", "tasks/serving/replies"),
    "tasks/steps/test_data": ("tasks/steps/prompt_hashes", "tasks/steps/rows"),
    "tasks/steps/test_difficulty": ("tasks/steps/drawing",),
    "tasks/steps/test_drift": ("tasks/report/drift_page",),
    "tasks/steps/test_online_rl": ("tasks/steps/rewards",),
    "tasks/steps/test_rejection": ("tasks/steps/sampled_answers",),
    "tasks/steps/test_reward_figures": ("tasks/report/reward_page",),
    "tasks/steps/test_reward_gate": ("tasks/report/reward_gate_page",),
    "flows/command/test_data": ("tasks/pipeline/data_check",),
    "flows/test_without_references": ("tasks/pipeline/references",),
    "tasks/pipeline/test_preflight": (
        "tasks/pipeline/sizes",
        "tasks/pipeline/unusual",
    ),
    "tasks/tracking/test_card": ("tasks/tracking/described",),
    "tasks/tracking/test_registry": ("tasks/tracking/registration",),
    "tasks/tracking/test_runs": ("tasks/tracking/datasets",),
    "tasks/tracking/test_packaged": ("tasks/tracking/reward_flavour",),
    "rlcore/rewards/test_language": ("rlcore/rewards/language_identifier",),
    "rlcore/test_placement": ("rlcore/config/placement",),
    "tasks/steps/test_runtime": ("rlcore/models/runtime",),
    "rlcore/training/test_ranks": ("rlcore/ranks",),
    "rlcore/training/test_group": (
        "rlcore/training/building",
        "rlcore/training/children",
        "rlcore/training/exported",
        "rlcore/training/rank",
        "rlcore/training/rank_pool",
        "rlcore/training/rank_process",
        "rlcore/training/handle",
    ),
    "rlcore/training/test_experience": ("rlcore/training/judges",),
}


def has_functions(path: str) -> bool:
    """Whether a module does something: one without functions declares or gathers names."""
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(modules()[path]))


MODULES = sorted(path.removesuffix(".py") for path in modules() if path.startswith(PACKAGES) and has_functions(path))


def mirror(module: str) -> Path:
    """Where the tests of a module stand: ``rlcore/packing`` has ``tests/rlcore/test_packing.py``."""
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}.py"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_own_tests_or_is_named_with_those_that_drive_it(module: str) -> None:
    driven = [test for test, parts in DRIVEN_BY.items() if module in parts]
    assert len(driven) == (0 if mirror(module).is_file() else 1)


def test_the_list_names_tests_and_modules_that_exist() -> None:
    assert [test for test in DRIVEN_BY if not (ROOT / "tests" / f"{test}.py").is_file()] == []
    assert {module for parts in DRIVEN_BY.values() for module in parts} <= set(MODULES)
