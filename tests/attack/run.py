"""Every attack on what docs/security.md promises, counted in one table.

    python -m tests.attack.run [--fast] [--write]

The attacks are tests, and `make test` runs those that are fast. A case that passes is an attack that was caught. A case
on sound input that fails is a false alarm. A test of many inputs says how many: ``record_property("hostile", n)``, and
``record_property("sound", n)``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "attack" / "README.md"
HEAD = "| attacks | tried | caught | valid inputs | false alarms | seconds | in `make test` |"
_BOXES, _REWARDS, _MODELS = "tests/rlcore/sandbox", "tests/rlcore/rewards", "tests/rlcore/models"
_SERVING, _AGENTS = "tests/tasks/serving", "tests/rlcore/agents"
_SERVERS, _GATE = "tests/tasks/operations", "tests/rlcore/sampling/vllm/worker/test_worker.py"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: the tests that attack, and the tests of sound input beside them."""

    attacks: str
    hostile: tuple[str, ...]
    sound: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of a test. ``counts``: how many inputs it says it has; ``is_fast``: `make test` runs it."""

    test: str
    passed: bool
    seconds: float
    counts: Mapping[str, int]
    is_fast: bool


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of the tests of a row."""

    tried: int
    caught: int
    sound: int
    false_alarms: int
    seconds: float
    is_fast: bool

    @property
    def is_good(self) -> bool:
        return self.tried == self.caught and not self.false_alarms


ROWS = (
    Row(
        attacks="programs that fake a right answer, as calls and as assertions; scripts",
        hostile=(f"{_BOXES}/test_attacks.py::test_a_fake_does_not_pass",),
        sound=(
            f"{_BOXES}/test_attacks.py::test_a_script_is_judged_by_what_it_prints",
            f"{_REWARDS}/test_code_tests.py::test_solutions_pass_and_stubs_fail_on_a_sample_of_humaneval",
        ),
    ),
    Row(
        attacks="functions that raise the end of a loop, by each way of calling them",
        hostile=(f"{_BOXES}/test_attacks.py::test_no_way_of_calling_a_function_takes_a_raised_end_for_an_answer",),
    ),
    Row(
        attacks="each fake by each way of calling it",
        hostile=(f"{_BOXES}/test_crowds.py::test_no_fake_passes_by_any_way_of_calling_it",),
    ),
    Row(
        attacks="stubs of HumanEval; its solutions",
        hostile=(f"{_REWARDS}/test_code_tests.py::test_all_of_humaneval_judges_its_solutions_and_stubs_right",),
    ),
    Row(
        attacks="programs that try to leave the box",
        hostile=(f"{_BOXES}/test_attacks.py::test_a_program_stays_in_its_box",),
        sound=(f"{_BOXES}/test_pool.py::test_a_run_ends_in_a_verdict",),
    ),
    Row(
        attacks="programs that hurt the supervisor",
        hostile=(
            f"{_BOXES}/test_pool.py::test_half_a_surrogate_pair_comes_back_as_its_escape",
            f"{_BOXES}/test_pool.py::test_data_that_breaks_the_tests_is_an_error_of_the_program",
            f"{_BOXES}/test_pool.py::test_a_result_larger_than_tests_can_pass_on_is_an_error_of_the_program",
            f"{_BOXES}/test_pool.py::test_much_output_over_many_tests_is_no_failure_of_ours",
            f"{_BOXES}/test_pool.py::test_an_answer_that_takes_long_to_read_is_read_within_the_time_of_its_test",
            f"{_BOXES}/test_wire.py::test_malformed_bytes_are_refused",
        ),
        sound=(f"{_BOXES}/test_wire.py::test_plain_data_comes_back_as_it_was",),
    ),
    Row(
        attacks="hostile programs among honest ones, on a busy machine",
        hostile=(
            f"{_BOXES}/test_crowds.py::test_hostile_programs_among_honest_ones_change_no_verdict_on_a_busy_machine",
        ),
    ),
    Row(
        attacks="processes that make the image of the boxes at once",
        hostile=(f"{_BOXES}/test_crowds.py::test_images_made_by_several_processes_at_once_are_one_image_each_time",),
    ),
    Row(
        attacks="rows and answers of reasoning-gym that hold code",
        hostile=(
            f"{_REWARDS}/test_procedural.py::test_no_field_of_a_row_is_run_as_code",
            f"{_REWARDS}/test_procedural.py::test_no_answer_is_run_as_code",
        ),
        sound=(
            f"{_REWARDS}/test_procedural.py::test_the_fields_of_the_generators_own_rows_are_let_through",
            f"{_REWARDS}/test_procedural.py::test_the_allowed_tokens_let_the_right_answer_through",
        ),
    ),
    Row(
        attacks="texts that make a reader of answers slow, or a pattern match for ever",
        hostile=(
            f"{_REWARDS}/mathematics/test_reading.py::test_reading_is_quick_for_any_text",
            f"{_REWARDS}/mathematics/test_reading.py::test_comparing_is_quick_for_any_answer",
            f"{_REWARDS}/test_code_tests.py::test_finding_the_program_takes_linear_time",
            f"{_REWARDS}/test_text_rewards.py::test_checking_is_quick_for_any_text",
            f"{_REWARDS}/test_text_rewards.py::"
            "test_a_pattern_that_backtracks_for_ever_is_cut_off_and_the_next_completions_are_judged",
        ),
    ),
    Row(
        attacks="echoes of the problem, and work that is left to do; worked-out answers",
        hostile=(
            f"{_REWARDS}/mathematics/test_rows.py::test_an_answer_that_repeats_the_problem_or_leaves_the_work_is_wrong",
        ),
    ),
    Row(
        attacks="products in random spellings, with a wrong reference and a right one",
        hostile=(
            f"{_REWARDS}/mathematics/test_math_reward.py::test_thousands_of_products_are_what_multiplication_makes_of_them",
        ),
    ),
    Row(
        attacks="hostile mathematics among honest answers",
        hostile=(
            f"{_REWARDS}/mathematics/test_math_reward.py::"
            "test_hostile_answers_among_honest_ones_are_wrong_and_cost_nobody_else_a_score",
        ),
    ),
    Row(
        attacks="policies that solve nothing, by every reward",
        hostile=(
            f"{_REWARDS}/test_degenerate_policies.py::test_policies_that_solve_nothing_earn_what_the_page_says",
            f"{_REWARDS}/test_degenerate_policies.py::test_programs_that_solve_nothing_earn_what_the_page_says",
        ),
    ),
    Row(
        attacks="judges asked for their key, completions that rate themselves",
        hostile=(
            f"{_REWARDS}/test_judge.py::test_an_endpoint_that_echoes_the_key_brings_it_into_no_error",
            f"{_REWARDS}/test_judge.py::test_a_completion_cannot_give_itself_a_mark",
            f"{_REWARDS}/test_judge.py::test_marks_are_read_exactly_and_a_reply_without_one_in_range_is_unscored",
        ),
        sound=(f"{_REWARDS}/test_judge.py::test_the_reward_is_the_mark_over_the_scale",),
    ),
    Row(
        attacks="model folders with a fault that was chosen",
        hostile=(
            f"{_MODELS}/test_model_validation.py::test_a_faulty_folder_is_refused_with_its_reason",
            f"{_MODELS}/test_model_validation.py::test_no_configuration_chooses_the_attention",
        ),
        sound=(
            f"{_MODELS}/test_model_validation.py::test_a_large_number_that_is_no_count_of_layers_is_let_through",
            f"{_MODELS}/test_model_validation.py::test_every_configuration_that_transformers_ships_is_let_through",
        ),
    ),
    Row(
        attacks="model folders with a random fault: imported, or refused with a reason",
        hostile=(f"{_MODELS}/test_model_validation.py::test_a_model_folder_with_any_fault_is_imported_or_refused",),
    ),
    Row(
        attacks="requests of a foreign page to the embedded servers",
        hostile=(f"{_SERVERS}/test_servers.py::test_a_browser_sees_the_status_and_no_foreign_page_may_read_an_answer",),
    ),
    Row(
        attacks="requests without the token to the server of an engine",
        hostile=(f"{_GATE}::test_anybody_else_is_refused",),
        sound=(f"{_GATE}::test_the_trainer_and_the_servers_own_start_are_let_through",),
    ),
    Row(
        attacks="wrong requests to any server of OpenAI's protocol",
        hostile=("tests/rlcore/openai_api/test_protocol.py::test_a_hostile_request_is_refused",),
    ),
    Row(
        attacks="wrong requests to the agents' gateway",
        hostile=(
            f"{_AGENTS}/test_requests.py::test_a_hostile_request_is_refused",
            f"{_AGENTS}/test_requests.py::test_what_cannot_be_served_is_refused_by_name",
        ),
        sound=(f"{_AGENTS}/test_requests.py::test_the_valid_bodies_are_answered",),
    ),
    Row(
        attacks="hostile agents, in a sandbox and without",
        hostile=(
            f"{_AGENTS}/test_hostile_programs.py::test_an_attack_ends_alone_in_time_and_with_all_that_it_started",
        ),
        sound=(f"{_AGENTS}/test_sampler.py::test_an_unchanged_program_plays_the_episodes_of_a_group",),
    ),
    Row(
        attacks="wrong requests to a served model, over the wire; those of OpenAI's client",
        hostile=(f"{_SERVING}/test_front.py::test_what_is_wrong_is_refused_in_the_form_of_openai",),
        sound=(
            f"{_SERVING}/test_front.py::test_values_that_change_nothing_are_taken",
            f"{_SERVING}/test_front.py::test_greedy_answers_are_those_of_the_evaluation",
            f"{_SERVING}/test_front.py::test_a_stream_is_the_whole_answer_in_parts",
            f"{_SERVING}/test_front.py::test_completions_take_texts_and_token_ids",
        ),
    ),
    Row(
        attacks="requests of a foreign page to real servers",
        hostile=("tests/integration/test_interfaces.py::test_a_page_in_a_browser_is_refused",),
    ),
    Row(
        attacks="texts that would be markup on a page",
        hostile=("tests/tasks/report/test_report.py::test_what_users_and_models_wrote_is_text",),
    ),
    Row(
        attacks="names of presets that lead out of the home; a name with a dot",
        hostile=(
            "tests/flows/test_post_train.py::test_a_name_that_leads_elsewhere_is_refused_before_anything_is_made",
        ),
        sound=("tests/flows/test_post_train.py::test_a_name_with_a_dot_works_from_the_run_to_the_export",),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="only what `make test` runs too")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    watch = Watch()
    marked = ["-m", "not slow and not services"] if options.fast else []
    pytest.main(["-q", *marked, *(test for row in ROWS for test in (*row.hostile, *row.sound))], plugins=[watch])
    tallies = [tally(row, watch.cases.values()) for row in ROWS]
    table = [HEAD, "|---|---|---|---|---|---|---|", *map(line, ROWS, tallies)]
    sys.stdout.write("\n".join(["", *table, ""]))
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")
    return 0 if all(each is not None and each.is_good for each in tallies if each or not options.fast) else 1


@dataclass(eq=False)  # pytest hashes it
class Watch:
    """Notes what became of each case while pytest runs; a case that was skipped is not among them."""

    cases: dict[str, Case] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.cases.pop(report.nodeid, None)
        if report.skipped:
            return
        self.cases[report.nodeid] = Case(
            test=report.nodeid.partition("[")[0],
            passed=report.passed and (before is None or before.passed),
            seconds=report.duration + (before.seconds if before else 0.0),
            counts=_counts(report.user_properties),
            is_fast=not {"slow", "services"} & set(report.keywords),
        )


def tally(row: Row, cases: Iterable[Case]) -> Tally | None:
    """Count the cases of a row; None if one of its attacks did not run."""
    of_row = [case for case in cases if case.test in (*row.hostile, *row.sound)]
    if set(row.hostile) - {case.test for case in of_row}:
        return None
    hostile = [(case, case.counts.get("hostile", int(case.test in row.hostile))) for case in of_row]
    sound = [(case, case.counts.get("sound", int(case.test in row.sound))) for case in of_row]
    return Tally(
        tried=sum(count for _, count in hostile),
        caught=sum(count for case, count in hostile if case.passed),
        sound=sum(count for _, count in sound),
        false_alarms=sum(count for case, count in sound if not case.passed),
        seconds=sum(case.seconds for case in of_row),
        is_fast=all(case.is_fast for case in of_row),
    )


def line(row: Row, found: Tally | None) -> str:
    if found is None:
        return f"| {row.attacks} | not run here | | | | | |"
    counts = (found.tried, found.caught, found.sound, found.false_alarms)
    cells = [*(f"{count:,}" for count in counts), f"{found.seconds:.0f}", "yes" if found.is_fast else "no"]
    return f"| {row.attacks} | " + " | ".join(cells) + " |"


def with_table(page: str, table: Sequence[str]) -> str:
    """The page with ``table`` in place of the one that it has."""
    before, _, rest = page.partition(HEAD)
    return before + "\n".join(table) + "\n\n" + rest.partition("\n\n")[2]


def _counts(properties: Sequence[tuple[str, Any]]) -> dict[str, int]:
    return {name: int(value) for name, value in properties if name in ("hostile", "sound")}


if __name__ == "__main__":
    sys.exit(main())
