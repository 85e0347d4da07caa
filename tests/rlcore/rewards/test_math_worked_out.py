r"""Products are products, units of another size are other answers, and a problem that is repeated is not solved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from rlcore.rewards.grader_pool import GraderPool
from rlcore.rewards.math_answer import MathOptions, MathReward, compare_exact
from rlcore.rewards.units import same_magnitude
from rlcore.types import Message, Rollout

# What stands side by side is a product: the form and its value.
PRODUCTS = [
    ("2(3)", "6"), ("(2)3", "6"), ("(2)(3)", "6"), ("2 (3)", "6"), ("(2) (3)", "6"), ("2[3]", "6"), ("[2](3)", "6"),
    ("{2}{3}", "6"), ("2{3}", "6"), ("(11)(10)", "110"), ("11(10)", "110"), ("(1)(2)(3)(4)", "24"), ("3(4)(5)", "60"),
    (r"2\left(3\right)", "6"), (r"\left(2\right)\left(3\right)", "6"), (r"\left(2\right)3", "6"), ("-2(3)", "-6"),
    ("-(2)(3)", "-6"), ("(-2)(3)", "-6"), ("2(-3)", "-6"), ("(-2)(-3)", "6"), (r"\frac{3(4)}{2}", "6"),
    (r"\frac{(3)(4)}{2}", "6"), (r"\frac{24}{2(2)}", "6"), (r"\frac{60}{(2)(5)}", "6"), ("2(3)^2", "18"),
    ("2^2(3)", "12"), ("(2)^2(3)", "12"), ("2(3)+1", "7"), ("1+2(3)", "7"), ("2(3)-1", "5"), ("10-2(3)", "4"),
    ("2(3)(x)", "6x"), ("2(3)x", "6x"), ("x+2(3)", "x+6"), ("2(1/2)", "1"), (r"2(\frac{1}{2})", "1"),
    (r"(2)\frac{1}{2}", "1"), (r"(4)\frac{3}{2}", "6"), (r"4\frac{3}{2}", "6"), (r"\frac{1}{2}(12)", "6"),
    ("2(0.5)", "1"), ("0.5(2)", "1"), ("3!(2)", "12"), (r"\sqrt{4}(3)", "6"), (r"3\sqrt{4}", "6"), ("2(3+4)", "14"),
    ("(3+4)2", "14"), ("5(2)-(3)(4)", "-2"), ("100(0)", "0"), ("7(1)", "7"), (r"2\cdot(3)", "6"), (r"2\times 3", "6"),
]  # fmt: skip
MIXED = [(r"1\frac{1}{2}", "3/2"), (r"-1\frac{1}{2}", "-3/2"), (r"2\frac{3}{4}", "11/4"), (r"2 \frac{3}{4}", "11/4")]


def sum_of(form: str) -> str:
    """Return the value of two adjacent factors if a parser added them."""
    return {"2(3)": "5", "(2)3": "5", "(11)(10)": "21", r"\frac{3(4)}{2}": "7/2", "(2)(3)": "5"}[form]


def test_what_stands_side_by_side_is_multiplied(math_pool: GraderPool) -> None:
    assert len(PRODUCTS) == 53
    pairs = PRODUCTS + [(form, value.replace("x", "x+0")) for form, value in PRODUCTS if "x" in value] + MIXED
    outcomes = math_pool.grade_all([{"answer": form, "reference": value} for form, value in pairs])
    wrong = [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome.value is not True]
    assert wrong == []
    sums = ("2(3)", "(2)3", "(11)(10)", r"\frac{3(4)}{2}", "(2)(3)")
    others = math_pool.grade_all([{"answer": form, "reference": sum_of(form)} for form in sums])
    assert [outcome.value for outcome in others] == [False] * len(sums)


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("5 km", "5 m", False),  # a single letter outside of \text{} is a variable: no number at all
        (r"5\text{ km}", r"5\text{ m}", False),
        ("5 kilometers", "5 meters", False),
        ("5 kilometres", "5 kilometers", True),
        ("5cm", "5 cm", True),
        ("5 cm", "5 mm", False),
        ("5 minutes", "5 hours", False),
        ("5 hours", "5 hr", True),
        ("5 mins", "5 minutes", True),
        ("5 cents", "5 dollars", False),
        ("5 cents", "$5", False),
        (r"\$5", "5 dollars", True),
        ("US$5", "5 USD", True),
        ("€5", "$5", False),
        ("5 grams", r"5\text{ kg}", False),
        (r"5\text{ cm}^2", r"5\text{ m}^2", False),
        (r"60\text{ km/h}", r"60\text{ m/s}", False),
        ("60 miles per hour", "60 miles per minute", False),
        (r"20^\circ C", r"20^\circ F", False),
        (r"20^\circ", "20 degrees", True),
        ("5 liters of water", "5 ml", False),
        ("5", "5 km", True),
        ("5 km", "5", True),
        ("5 apples", "5 pears", True),  # not known: not compared
        ("5 km", "5 hours", True),  # of two kinds: not compared
        (r"\frac{1}{2}\text{ km}", "0.5 m", False),
        ("5 days", "6 days", False),
        (r"5\text{ mW}", r"5\text{ MW}", False),
        ("5 MW", "5 megawatts", True),
        ("5 mw", "5 MW", True),
    ],
)
def test_units_of_one_kind_and_another_size_are_other_answers(answer: str, reference: str, is_right: bool) -> None:
    assert compare_exact(answer, reference, evaluated_only=True) is is_right


def test_the_size_of_a_unit_is_compared_behind_an_expression_too() -> None:
    assert not same_magnitude(r"2\pi\text{ cm}", r"2\pi\text{ m}")
    assert same_magnitude(r"2\pi\text{ cm}", r"2\pi")


# What is asked, the reference, an answer, and whether that is worked out.
ECHOES = [
    (r"Compute $\gcd(48,36)$.", "12", r"\gcd(48,36)", False),
    (r"Compute $\gcd(48,36)$.", "12", "12", True),
    (r"Find $\int_0^1 x^2dx$.", "1/3", r"\int_0^1 x^2dx", False),
    (r"Find $\int_0^1 x^2dx$.", r"\frac{1}{3}", r"\frac13", True),
    (r"Find $\int 2x\,dx$.", "x^2+C", r"\int 2x\,dx", False),
    (r"Find $\int 2x\,dx$.", "x^2+C", "C+x^2", True),
    (r"Find $\sum_{k=1}^n k$.", r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k", False),
    (r"Find $\sum_{k=1}^n k$.", r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", True),
    (r"Find $\frac{d}{dx}x^3$.", "3x^2", r"\frac{d}{dx}x^3", False),
    (r"Find $\binom{n}{1}$.", "n", r"\binom{n}{1}", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(1+x)^2", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", r"\left( x+1 \right)^{2}", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "1+2x+x^2", True),
    ("Expand (x+1)^2.", "x^2+2x+1", "(x + 1)^2", False),
    ("Factor $x^2-1$.", "(x-1)(x+1)", "x^2-1", False),
    ("Factor $x^2-1$.", "(x-1)(x+1)", "(x+1)(x-1)", True),
    (r"Simplify $\frac{x^2-1}{x-1}$.", "x+1", r"\frac{x^2-1}{x-1}", False),
    (r"Simplify $\frac{x^2-1}{x-1}$.", "x+1", "(x^2-1)/(x-1)", False),
    (r"Simplify $\frac{(x+1)(x-1)}{x-1}$.", "x+1", "(x+1)", True),
    (r"What is $\sin 60^\circ$?", r"\frac{\sqrt{3}}{2}", r"\sin(\pi/3)", False),
    (r"What is $\sin 60^\circ$?", r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
    (r"Rewrite $\sin^2 x$.", r"1-\cos^2 x", r"\sin^2 x", False),
    ("What is $3/4$ as a decimal?", "0.75", "3/4", False),
    ("What is $3/4$ as a decimal?", "0.75", "0.750", True),
    (r"Which is more, $\frac{3}{4}$ or $\frac{1}{2}$?", "3/4", r"\frac{3}{4}", True),
    (r"Which is more, $x+1$ or $x$?", "x+1", "1+x", True),
    (r"A car does $60\text{ km/h}$. How fast is it?", "60", r"60\text{ km/h}", True),
    ("Write $2*10^3$ out.", "2000", "2*10^3", False),
    ("Which is the third biggest? (a) -2/5 (b) 21584/11 (c) 2 (d) 0.1", "-0.4", "-2/5", True),
    ("Which is the biggest: 4/10, 1/5 or -3?", "0.4", "4/10", True),
    ("Write as a decimal: 2/5", "0.4", "2/5", False),
    ("How many metres are in two kilometres?", "2000", r"2 \times 10^3", True),
]


# What is asked, the reference, answers that are worked out, and answers in a dress of what is asked.
FORMS = [
    (
        "Expand $(x+4)^2$.", "x^2+8x+16",
        ("x^2+8x+16", "16+8x+x^2", "x^{2}+8 \\cdot x+16", "y=x^2+8x+16"),
        ("(x+4)^2+0", r"1\cdot(x+4)^2", r"\sqrt{(x+4)^4}", "(x+4)(x+4)", "(x+4)^2-0", r"\frac{(x+4)^2}{1}", "(-x-4)^2",
         "|x+4|^2", r"e^{\ln (x+4)^2}", r"\frac{(x+4)^3}{x+4}", "(x+4)^2+x-x", "x(x+8)+16", "(x+4)^{1+1}",
         r"2\cdot\frac{(x+4)^2}{2}", "-(-(x+4)^2)", r"(x+4)^2 \cdot (\sin^2 x+\cos^2 x)", r"\int (2x+8) dx"),
    ),
    (
        "Expand (x+5)^2.", "x^2+10x+25", ("x^2+10x+25",), ("(x+5)(x+5)", "(5+x)^2+0"),
    ),
    (
        "Factor $x^2-49$.", "(x-7)(x+7)", ("(x+7)(x-7)", "(7+x)(x-7)", "-(7-x)(7+x)"),
        ("x^2-49", "x^2-49+0", r"1\cdot(x^2-49)", "-(49-x^2)", "x(x-49/x)", r"\frac{x^4-2401}{x^2+49}"),
    ),
    (
        r"Find $\frac{d}{dx}x^5$.", "5x^4", ("5x^4", r"5\cdot x^4"),
        (r"\dfrac{d}{dx}x^5", r"\frac{\mathrm{d}}{\mathrm{d}x}x^5", r"\frac{d(x^5)}{dx}", "d/dx x^5", "(x^5)'",
         "5x^{5-1}", r"\frac{\partial}{\partial x}x^5"),
    ),
    (
        r"Simplify $\sqrt{98}$.", r"7\sqrt{2}", (r"7\sqrt{2}", r"\sqrt{2}\cdot 7"),
        (r"\sqrt{98}+0", "98^{1/2}", r"1\cdot\sqrt{98}", r"\sqrt{49\cdot2}", r"\frac{14}{\sqrt{2}}"),
    ),
    (
        r"Simplify $\frac{x^2-25}{x-5}$.", "x+5", ("x+5", "5+x"),
        (r"\frac{(x+5)(x-5)}{x-5}", "(x^2-25)(x-5)^{-1}", r"\frac{25-x^2}{5-x}"),
    ),
    (
        r"Write $\frac{1}{x}+\frac{1}{x+3}$ as one fraction.", r"\frac{2x+3}{x(x+3)}",
        (r"\frac{2x+3}{x^2+3x}", r"\frac{2x+3}{x(x+3)}"), (r"\frac{1}{x+3}+\frac{1}{x}",),
    ),
    ("Simplify $3a+4a$.", "7a", ("7a", r"a\cdot7"), ("4a+3a", "(3+4)a", "6a+a")),
    (r"Find $\int 6x\,dx$.", "3x^2+C", ("3x^2+C", "3x^2+c"), ("∫6x dx", "3x^2")),
    ("Solve $2x+3=13$.", "x=5", ("x=5", "5"), ("2x=10", "2x+3=13", "x=10/2", "x-5=0")),
    ("Solve $2x<14$.", "x<7", ("x<7", r"(-\infty,7)"), ("2x<14", "x<14/2", "x-7<0")),
    ("Write $x^2+y^2-36=0$ in standard form.", "x^2+y^2=36", ("y^2+x^2=36",), ("x^2+y^2-36=0",)),
    (
        "Multiply out $(y+4)(y+6)$.", "y^2+10y+24", ("24+10y+y^2",),
        ("y^2+10y+4\\cdot6", "y^2+6y+4y+24", "y^2+5y+5y+24", "y^2+10y+24y^0"),
    ),
    ("Factor $x^2-8x$.", "x(x-8)", ("(x-8)x",), (r"\frac{2x(x-8)}{2}", "x^2-8x")),
    (
        r"Rationalize $\frac{2}{\sqrt5-1}$.", r"\frac{\sqrt5+1}{2}", (r"\frac12+\frac{\sqrt5}{2}",),
        (r"\frac{2}{\sqrt5-1}", r"2(\sqrt5-1)^{-1}"),
    ),
    ("Solve $x^2=81$.", "-9, 9", (r"\pm9", "x=9, x=-9"), (r"\pm\sqrt{81}", "x^2=81", "9, -3^2")),
    ("Solve $0<x+1<6$.", "(-1,5)", ("-1<x<5",), ("(0-1,6-1)", "0<x+1<6")),
    ("Express $a$ in terms of $b$ if $b=5a$.", r"a=\frac{b}{5}", (r"\frac{b}{5}", "a=b/5"), ("b=5a", "5a=b")),
    ("What is its area?", r"\frac{(a+b)h}{2}", (r"\frac{1}{2}(a+b)h", r"\frac{ah+bh}{2}"), ()),  # any form
]  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(timeout_seconds=10.0))  # the default: evaluated_only
    yield made
    made.close()


def test_an_answer_that_repeats_the_problem_or_leaves_the_work_is_wrong(
    reward: MathReward, make_rollout: Callable[..., Rollout], record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", sum(not is_right for *_, is_right in ECHOES))
    record_property("sound", sum(is_right for *_, is_right in ECHOES))
    rollouts = []
    for problem, reference, answer, _ in ECHOES:
        rollout = make_rollout(rf"It is \boxed{{{answer}}}.", reference)
        turns = (Message(role="user", content=problem),)
        rollouts.append(dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, messages=turns)))
    scores = reward(rollouts)
    assert [row for row, score in zip(ECHOES, scores, strict=True) if score.value != float(row[3])] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_where_another_form_is_asked_for_the_problem_in_another_dress_is_wrong(
    reward: MathReward,
    make_rollout: Callable[..., Rollout],
    record_property: Callable[[str, object], None],
    form: tuple[str, str, tuple[str, ...], tuple[str, ...]],
) -> None:
    problem, reference, sound, hostile = form
    record_property("hostile", len(hostile))
    record_property("sound", len(sound))
    turns = (Message(role="user", content=problem),)
    rollouts = [make_rollout(rf"\boxed{{{answer}}}", reference) for answer in (*sound, *hostile)]
    asked = [dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, messages=turns)) for one in rollouts]
    values = dict(zip((*sound, *hostile), (score.value for score in reward(asked)), strict=True))
    assert values == dict.fromkeys(sound, 1.0) | dict.fromkeys(hostile, 0.0)


@pytest.mark.parametrize(
    "answer", ["12", "12.0", "(12)", r"\left(12\right)", r"\mathbf{12}", r"\text{12}", "12cm", r"\displaystyle 12",
               r"1.2 \times 10^1", r"12\!", "+ 12", "x = 12", "The answer is 12", r"\$12", "12."],
)  # fmt: skip
def test_a_worked_out_number_is_one_however_it_is_dressed(answer: str) -> None:
    assert compare_exact(answer.rstrip("."), "12", evaluated_only=True) is True


@pytest.mark.parametrize("answer", ["6+6", "24/2", r"\sqrt{144}", "3(4)", r"\gcd(24,36)", "2^3+4", "12ab", r"\{12\}"])
def test_a_number_that_is_left_to_be_worked_out_is_none(answer: str) -> None:
    assert compare_exact(answer, "12", evaluated_only=True) is False


def test_without_evaluated_only_the_same_answers_are_compared_by_their_value(
    make_rollout: Callable[..., Rollout],
) -> None:
    plain = MathReward(MathOptions(evaluated_only=False, timeout_seconds=10.0))
    answers = [("(x+1)^2", "x^2+2x+1"), ("3(4)", "12"), (r"\sqrt{144}", "12"), ("3(4)", "7")]
    rollouts = [make_rollout(rf"\boxed{{{answer}}}", reference) for answer, reference in answers]
    values = [score.value for score in plain(rollouts)]
    plain.close()
    assert values == [1.0, 1.0, 1.0, 0.0]
