"""The reward canary is silent on sound terms, and stops a run whose term is wrong, turned round, stuck or shuffled."""

from __future__ import annotations

import itertools
import json
import math as numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from rlcore.checks.canaries.known_answers import known_answer, prompts_for
from rlcore.checks.canaries.rewards import (
    check_probes,
    known_answers_canary,
    reward_probes,
    terms_canary,
)
from rlcore.errors import CanaryError, RewardError
from rlcore.rewards.base import RewardFn, failed_score, scored
from rlcore.rewards.format import FormatOptions, FormatReward
from rlcore.rewards.judge import JudgeOptions, JudgeReward
from rlcore.rewards.math_answer import MathReward
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.procedural import ProceduralReward
from rlcore.rewards.reward_model import RewardModelOptions, RewardModelReward, TokenItems
from rlcore.rewards.text_rewards import LengthOptions, length_reward
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Prompt, Rollout, Score
from tests import strategies


def reward_canary(reward: RewardFn, prompts: Sequence[Prompt], *, prefill: str = "") -> None:
    check_probes(reward, [probe for each in prompts for probe in reward_probes(each, prefill=prefill)])


def prompt(reference: str) -> Prompt:
    return Prompt(prompt_id="p1", messages=(), token_ids=(1,), reference=reference, task="test")


NUMBERS = [prompt("35"), prompt("-1/2"), prompt("50%"), prompt("so 1 + 1 = 2\n#### 2")]


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    with closing(MathReward()) as reward:
        yield reward


class Verifier:
    """A broken reward."""

    name = "math"

    def __init__(self, score: Callable[[Rollout], Score | bool | float]) -> None:
        self._score = score

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        found = map(self._score, rollouts)
        return [each if isinstance(each, Score) else scored("math", float(each)) for each in found]


def constant(score: Score | float) -> Verifier:
    return Verifier(lambda _: score)


def test_a_correct_verifier_passes(math: MathReward) -> None:
    reward_canary(math, [*NUMBERS, prompt(r"\frac{\sqrt{8}}{2}"), prompt("Paris")])


def test_where_the_template_begins_the_thinking_the_probes_end_it() -> None:
    reward, prefill = MathReward(prefill="<think>\n"), "<think>\n"
    reward_canary(reward, NUMBERS, prefill=prefill)
    with pytest.raises(CanaryError, match="right answer '<answer>35</answer>'"):
        reward_canary(reward, NUMBERS)  # no answer at all to this verifier
    formats = [FormatReward(options, prefill=prefill) for options in SOUND_FORMATS[:3]]
    for term in (reward, *formats):
        assert terms_canary(mixed(term), NUMBERS, [], prefill=prefill) == []
    reward.close()


def test_a_correct_procedural_verifier_passes() -> None:
    import reasoning_gym

    datasets = ("chain_sum", "gsm_symbolic")  # the second's own scorer reads the first number
    entries = {name: reasoning_gym.create_dataset(name, seed=1, size=1)[0] for name in datasets}
    with closing(ProceduralReward()) as reward:
        reward_canary(reward, [prompt(json.dumps({"dataset": name, "entry": each})) for name, each in entries.items()])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (constant(0.0), "4 of 23 .*right answer '<answer>35</answer>' for '35' scored 0.0"),
        (constant(1.0), "19 of 23 .*wrong answer '' for '35' scored 1.0"),
        (constant(failed_score("signal only works in main thread")), "was not scored: signal only works"),
        (constant(numbers.nan), "23 of 23"),
        (
            Verifier(lambda r: any(map(str.isdigit, r.text))),
            "11 of 23 .*wrong answer '<answer>36</answer>' for '35' scored 1.0",
        ),
    ],
)
def test_a_broken_verifier_is_stopped_and_its_misjudged_answers_named(broken: RewardFn, message: str) -> None:
    with pytest.raises(CanaryError, match=f"(?s){message}"):
        reward_canary(broken, NUMBERS)


def test_a_reward_of_another_kind_than_the_references_is_stopped(math: MathReward) -> None:
    reference = json.dumps({"dataset": "chain_sum", "entry": {"question": "3 + 4?", "answer": "7", "metadata": {}}})
    with pytest.raises(CanaryError, match="right answer '<answer>7</answer>'"):
        reward_canary(math, [prompt(reference)])


def test_without_probes_nothing_is_proven() -> None:
    with pytest.raises(CanaryError, match="no probes"):
        check_probes(constant(1.0), [])


def test_the_known_answer_is_the_references_own() -> None:
    assert known_answer(prompt("so 2\n#### 2")) == "2"
    assert known_answer(prompt('{"dataset": "d", "entry": {"answer": "7"}}')) == "7"
    assert known_answer(prompt("{1, 2}")) == "{1, 2}"
    assert known_answer(prompt('{"style": "stdin", "solution": "print(1)"}')) == "\n```python\nprint(1)\n```\n"


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [("-1/2", ["1/2", "-1/2 or 1/2"]), ("12", ["13", "12 or 13", "112"]), ("50%", ["51%", "50% or 51%", "150%"])],
)
def test_a_number_is_probed_with_its_neighbour_and_with_answers_that_contain_it(
    reference: str, wrong: list[str], math: MathReward
) -> None:
    right, *others = reward_probes(prompt(reference))
    texts = ["", *(f"<answer>{text}</answer>" for text in ("this is no answer", *wrong))]
    assert (right.rollout.text, [probe.rollout.text for probe in others]) == (f"<answer>{reference}</answer>", texts)
    check_probes(math, [right, *others])


def test_a_verifier_that_accepts_answers_which_contain_the_right_one_is_stopped() -> None:
    with pytest.raises(CanaryError, match=r"(?s)misjudges 2 of 6.*wrong answer '<answer>12 or 13</answer>' for '12'"):
        reward_canary(Verifier(lambda r: r.prompt.reference in r.text), [prompt("12")])


def test_a_code_task_without_a_solution_has_no_known_answer_and_wrong_ones_all_the_same() -> None:
    task = prompt('{"style": "stdin", "tests": []}')
    assert known_answer(task) is None
    assert [probe.is_right for probe in reward_probes(task)] == [False, False]


def test_prompts_are_probed_of_the_terms_own_kind_and_of_every_task_one_first() -> None:
    sums = [replace(prompt("7"), prompt_id=f"sum{n}", task="sum") for n in range(5)]
    other = replace(prompt("8"), prompt_id="other", task="other")
    code = replace(prompt('{"tests": [], "solution": "x"}'), prompt_id="code", task="code")
    bare = replace(prompt(""), prompt_id="bare", task="chat")
    mixed = [bare, code, *sums, other]
    drawn = prompts_for("math", mixed)
    assert len(drawn) == 4
    assert {p.task for p in drawn[:2]} == {"sum", "other"}
    assert {p.task for p in drawn[2:]} == {"sum"}
    assert [p.prompt_id for p in prompts_for("code", mixed)] == ["code"]
    assert [p.prompt_id for p in prompts_for("procedural", [bare, code])] == ["code"]  # wrong kind: it will be stopped
    assert prompts_for("math", [bare]) == []


def test_the_order_of_the_rows_decides_nothing_and_a_reference_that_grades_nobody_is_passed_over(
    math: MathReward,
) -> None:
    sums = [replace(prompt(str(n)), prompt_id=f"sum{n}") for n in range(12)]
    rows = [*sums, *(replace(prompt("proof"), prompt_id=f"proof{n}") for n in range(30))]
    drawn = prompts_for("math", rows)
    for order in (rows[::-1], rows[20:] + rows[:20], sorted(rows, key=lambda row: row.reference)):
        assert prompts_for("math", order) == drawn
        reward_canary(math, prompts_for("math", order))
    assert prompts_for("math", rows[12:]) == []


class Broken:
    """A sound reward whose scores are changed on the way out."""

    def __init__(self, reward: RewardFn, change: Callable[[list[Score]], list[Score]]) -> None:
        self.name, self._reward, self._change = reward.name, reward, change

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return self._change(self._reward(rollouts))


def negated(scores: list[Score]) -> list[Score]:
    return [replace(score, value=-score.value) for score in scores if score.value is not None]


def flipped(scores: list[Score]) -> list[Score]:
    return [replace(score, value=1.0 - score.value) for score in scores if score.value is not None]


def stuck(scores: list[Score]) -> list[Score]:
    return [scores[0]] * len(scores)


def mixed(*rewards: RewardFn) -> WeightedReward:
    return WeightedReward([WeightedTerm(reward, 1.0) for reward in rewards])


def samples(count: int = 4) -> list[Rollout]:
    made = strategies.scored_rollout(1.0, completion_ids=(3,)).rollout
    return [
        replace(made, completion_ids=(3,) * n, loss_mask=(True,) * n, sampler_logprobs=(-1.0,) * n, text="word " * n)
        for n in range(1, count + 1)
    ]


def lengths(rollouts: Sequence[Rollout]) -> list[float | None]:
    return [float(len(rollout.completion_ids)) for rollout in rollouts]


SOUND_FORMATS = [
    FormatOptions(style="boxed"), FormatOptions(style="hashes"), FormatOptions(style="think_answer"),
    FormatOptions(style="tags", tags="plan, solution"), FormatOptions(style="regex", pattern="a+", example="aaa"),
]  # fmt: skip


def test_correct_terms_pass_together(math: MathReward) -> None:
    formats = [FormatReward(options) for options in SOUND_FORMATS[:1]]
    terms = mixed(math, *formats, length_reward(LengthOptions(limit=4, buffer=3)), FunctionReward(lengths, "lengths"))
    assert terms_canary(terms, NUMBERS, samples()) == []
    assert known_answers_canary(terms, NUMBERS) == []


@pytest.mark.parametrize("options", SOUND_FORMATS, ids=lambda options: options.style)
def test_a_format_knows_what_is_in_it_and_what_is_not(options: FormatOptions) -> None:
    with mixed(FormatReward(options)) as reward:
        assert terms_canary(reward, NUMBERS, []) == []
    if options.style != "regex":
        right, wrong = FormatReward(options).known()
        assert len(wrong) == 2
        assert right not in wrong


@pytest.mark.parametrize("change", [negated, flipped, stuck, lambda s: [*s[1:], s[0]], lambda s: s[::-1]])
def test_a_verifier_of_the_mix_that_is_broken_is_stopped(
    change: Callable[[list[Score]], list[Score]], math: MathReward
) -> None:
    """Beside a sound one: it is asked by itself."""
    reward = mixed(length_reward(LengthOptions(limit=4, buffer=3)), Broken(math, change))
    for canary in (lambda: terms_canary(reward, NUMBERS, samples()), lambda: known_answers_canary(reward, NUMBERS)):
        with pytest.raises(CanaryError, match="'math' misjudges"):
            canary()


def test_a_verifier_that_takes_another_prompts_answer_for_right_is_stopped(math: MathReward) -> None:
    known = dict[str, Score]()  # a text has the score that it had first, whichever prompt it answers
    remembers = Verifier(lambda rollout: known.setdefault(rollout.text, math([rollout])[0]))
    far = [prompt(number) for number in ("10", "20", "30", "40")]  # no answer is the neighbour of another
    with pytest.raises(CanaryError, match="misjudges 4 of 28"):
        known_answers_canary(mixed(remembers), far)


@pytest.mark.parametrize("fault", [flipped, stuck, negated])
def test_a_format_that_is_broken_is_stopped(
    fault: Callable[[list[Score]], list[Score]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FormatReward.__call__
    monkeypatch.setattr(FormatReward, "__call__", lambda reward, rollouts: fault(whole(reward, rollouts)))
    with mixed(FormatReward(FormatOptions(style="boxed"))) as reward, pytest.raises(CanaryError, match="'format'"):
        terms_canary(reward, NUMBERS, [])


@pytest.mark.parametrize("order", [o for o in itertools.permutations(range(4)) if o != (0, 1, 2, 3)])
def test_every_fixed_shuffle_of_a_term_without_known_answers_is_seen(order: tuple[int, ...]) -> None:
    def shuffled(scores: list[Score]) -> list[Score]:
        return [scores[place] for place in order] if len(scores) == 4 else scores

    reward = mixed(Broken(length_reward(LengthOptions(limit=4, buffer=4)), shuffled))
    with pytest.raises(CanaryError, match="not in the order of the rollouts"):
        terms_canary(reward, [], samples())


def test_a_term_that_returns_its_scores_in_another_order_each_time_is_seen() -> None:
    orders = itertools.cycle([(0, 1, 2, 3), (2, 0, 3, 1)])

    def shuffled(rollouts: Sequence[Rollout]) -> list[float | None]:
        values = lengths(rollouts)
        return [values[place] for place in next(orders)]

    with pytest.raises(CanaryError, match="not in the order"):
        terms_canary(mixed(FunctionReward(shuffled, "shuffled")), [], samples())


def test_a_function_whose_scores_change_between_calls_is_reported_and_not_compared() -> None:
    draws = torch.Generator().manual_seed(0)
    noisy = FunctionReward(lambda rollouts: torch.rand(len(rollouts), generator=draws).tolist(), "noisy")
    assert "scores the same completions differently" in terms_canary(mixed(noisy), [], samples())[0]


def test_a_users_verifier_that_is_upside_down_is_stopped(math: MathReward) -> None:
    def inverted(rollouts: Sequence[Rollout]) -> list[float | None]:
        return [None if score.value is None else 1.0 - score.value for score in math(rollouts)]

    with pytest.raises(CanaryError, match="scores every known right answer as wrong"):
        terms_canary(mixed(FunctionReward(inverted, "inverted")), NUMBERS, samples())


def test_a_function_that_measures_something_else_passes() -> None:
    brief = FunctionReward(lambda rollouts: [1.0 / (1.0 + len(rollout.text)) for rollout in rollouts], "brief")
    assert terms_canary(mixed(brief), NUMBERS, samples()) == []


def test_a_function_that_cannot_read_the_probes_is_not_stopped_by_them() -> None:
    def picky(rollouts: Sequence[Rollout]) -> list[float | None]:
        assert all(rollout.completion_ids != (0,) for rollout in rollouts), "a probe"
        return lengths(rollouts)

    (note,) = terms_canary(mixed(FunctionReward(picky, "picky")), NUMBERS, samples())
    assert "was not probed with known answers: the reward function picky raised" in note


def test_a_term_that_gives_no_finite_number_is_stopped() -> None:
    for value in (numbers.nan, numbers.inf):
        bad = FunctionReward(lambda rollouts, value=value: [value] * len(rollouts), "bad")
        with pytest.raises(CanaryError, match="'bad' returned a value that is not finite"):
            terms_canary(mixed(bad), [], samples())


def test_a_term_that_scores_nothing_is_stopped_with_its_reason() -> None:
    with pytest.raises(CanaryError, match="'none' scores none of 4 completions: the function returned None"):
        terms_canary(mixed(FunctionReward(lambda rollouts: [None] * len(rollouts), "none")), [], samples())


def test_a_term_that_loses_a_score_is_stopped(math: MathReward) -> None:
    short = Broken(length_reward(LengthOptions(limit=4, buffer=3)), lambda scores: scores[:-1])
    with pytest.raises(RewardError, match="3 scores for 4 rollouts"):
        terms_canary(mixed(short), [], samples())


@pytest.mark.parametrize(("noise", "is_sound"), [(0.0, True), (0.02, True), (2.0, False)])
def test_a_reward_models_scores_may_depend_on_the_batch_by_rounding_alone(noise: float, is_sound: bool) -> None:
    calls = itertools.count()

    def score(items: TokenItems, *, calibrated: bool) -> torch.Tensor:
        sign = 1.0 if next(calls) < 2 else -1.0  # of the two calls on the same batch nothing is seen
        values = torch.tensor([float(len(completion)) for _, completion in items])
        return (values + sign * noise * torch.tensor([1.0, -1.0, 1.0, -1.0]))[None]

    reward = mixed(RewardModelReward(RewardModelOptions(), score))
    if is_sound:
        assert terms_canary(reward, [], samples()) == []
    else:
        with pytest.raises(CanaryError, match="not in the order"):
            terms_canary(reward, [], samples())


def test_a_judge_is_asked_once_and_one_that_does_not_answer_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(judge: JudgeReward, rollouts: Sequence[Rollout]) -> list[Score]:
        asked.append(len(rollouts))
        return [scored("judge", 0.5)] * len(rollouts)

    reward = mixed(JudgeReward(JudgeOptions(base_url="http://127.0.0.1:9/v1", model="m")))
    monkeypatch.setattr(JudgeReward, "__call__", answer)
    assert terms_canary(reward, NUMBERS, samples(9)) == []
    assert asked == [4]
    monkeypatch.setattr(JudgeReward, "__call__", lambda _, rollouts: [failed_score("refused")] * len(rollouts))
    with pytest.raises(CanaryError, match="'judge' scores none of 4 completions: refused"):
        terms_canary(reward, NUMBERS, samples())


def test_prompts_without_references_are_reported_and_not_probed(math: MathReward) -> None:
    note = "the reward 'math' was not probed: no prompt has a reference"
    assert terms_canary(mixed(math), [prompt("")], samples()) == [note]
    assert known_answers_canary(mixed(math), [prompt("")]) == [note]
