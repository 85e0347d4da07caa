r"""Verdicts by kind of answer: (reference, answer, verdict), decided by hand before they were run.

``R`` is right and ``W`` is wrong, by the policy of docs/rewards.md. Each kind has right answers in other spellings
beside wrong ones that look like them. All go through the reward as a preset builds it, inside ``\boxed{}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.types import Rollout

R, W = 1.0, 0.0
Table = Sequence[tuple[str, str, float]]

EXACT: Table = [
    (r"3-\frac{1}{2^{1500}}", r"3-\frac{1}{2^{1501}}", W),
    (r"3-\frac{1}{2^{1500}}", r"3-2^{-1500}", R),
    (r"1-\frac{1}{77!}", r"1-\frac{1}{78!}", W),
    (r"\frac{1}{77!}", r"\frac{78}{78!}", R),
    (r"\frac{5}{90!}", r"\frac{4}{90!}", W),
    (r"\left(\frac{2}{7}\right)^{900}", r"\left(\frac{2}{7}\right)^{901}", W),
    (r"\left(\frac{2}{7}\right)^{900}", r"\frac{2^{900}}{7^{900}}", R),
    (r"\frac{3001!}{3^{800}}", r"3^{801}", W),
    (r"\frac{2001!}{2001}", r"2000!", R),
    (r"7^{3000}+1", r"7^{3000}", W),
    (r"7^{3000}", r"49^{1500}", R),
    (r"10^{700}-1", r"10^{700}+1", W),
    (r"\sqrt{3}+2^{-1800}", r"\sqrt{3}+2^{-1801}", W),
    (r"\sqrt{3}+2^{-1800}", r"2^{-1800}+\frac{3}{\sqrt{3}}", R),
    (r"\sqrt{2}+\sqrt{7}", r"\sqrt{9+2\sqrt{14}}", R),
    (r"\sqrt{2}+\sqrt{7}", r"\sqrt{9+2\sqrt{15}}", W),
    (r"\sqrt[3]{7+5\sqrt{2}}", r"1+\sqrt{2}", R),
    (r"\frac{\pi}{4}", r"\frac{\pi}{4}+10^{-60}", W),
    (r"e^{\pi\sqrt{163}}", r"262537412640768743.99999999999925", W),
    (r"\binom{400}{3}", r"\binom{400}{397}", R),
    (r"x+\frac{1}{3^{500}}", r"x+\frac{1}{3^{501}}", W),
    (r"\frac{x^{2024}-1}{x-1}", r"\frac{x^{2025}-1}{x-1}", W),
    ("0.1x", r"\frac{x}{10}", R),
    ("0.333x", r"\frac{x}{3}", W),
    (r"2^{100000}", r"4^{50000}", R),
    (r"2^{100000}", r"4^{50001}", W),
]
TIMES_AND_DATES: Table = [
    ("7:30", "15:00", W),
    ("10:20", "5:10", W),
    ("7:30", "07:30", R),
    ("7:30", r"7:30\text{ a.m.}", R),
    (r"7:30\text{ PM}", "7:30 pm", R),
    (r"7:30\text{ PM}", r"7:30\text{ AM}", W),
    (r"7:30\text{ PM}", "19:30", R),
    ("7:30", "7.5", W),
    ("7:30", "7:31", W),
    ("1:02:30", "1:02:31", W),
    ("2023-11-04", "2008", W),
    ("2023-11-04", "2023-11-4", R),
    ("2023-11-04", "November 4, 2023", R),
    ("2023-11-04", "4 November 2023", R),
    ("2023-11-04", "2023-04-11", W),
    ("3/14/2015", "14/3/2015", W),
    (r"8\text{ pm}", r"8\text{ am}", W),
]
RATIOS: Table = [
    ("4:3:2", "2", W),
    ("4:3:2", "4/3/2", W),
    ("4:3:2", "8:6:4", W),  # not in lowest terms
    ("4:3:2", "4 : 3 : 2", R),
    ("4:3:2", "2:3:4", W),
    ("5:7", r"\frac{5}{7}", R),
    ("5:7", "7:5", W),
    ("5:7", "10:14", W),
    ("5:12", r"\frac{5}{12}", R),
    ("a:b=5:7", "5:7", R),
    (r"1:3:5:\ldots", r"1:2:4:\ldots", W),
]
BASES: Table = [
    ("1011_2", "1011_{2}", R),
    ("1011_2", "(1011)_2", R),
    ("1011_2", "1011_3", W),
    ("1011_2", "1011", W),
    ("1011_2", "11", W),
    ("0.21_3", "0.21", W),
    ("2A_{16}", "2A_{16}", R),
    ("2A_{16}", "2B_{16}", W),
    ("1011_2", r"1011_{\text{two}}", R),
    ("342_5", "342_{6}", W),
]
PRIMES: Table = [
    ("g'(x)", "g(x)", W),
    ("g(x)", "g'(x)", W),
    ("g'(x)", r"g^{\prime}(x)", R),
    ("g''(x)", "g'(x)", W),
    ("f(3x)", "3f(x)", W),
    ("f(x+2)", "f(2+x)", R),
    ("y'", "y", W),
]
LISTS: Table = [
    ("2, 2, 5", "2, 5", W),
    ("2, 5", "2, 2, 5", W),
    ("2, 2, 5", "5, 2, 2", R),
    (r"\{2, 2, 5\}", r"\{2, 5\}", R),  # sets
    ("4, 9", "x=4, x=9", R),
    ("4, 9", r"x=9 \text{ or } x=4", R),
    ("4, 9", "x_1=4, x_2=9", R),
    ("4, 9", "x = 4, 9", R),
    ("4, 9", "x=4, x=8", W),
    ("4, 9", r"\{4, 9\}", R),
    (r"\{4,9\}", r"x \in \{4,9\}", R),
    ("x_1=4, x_2=9", "9, 4", W),  # the second unknown is no first
    ("x_1=4, x_2=9", "4, 9", R),
    ("C_1=4, C_2=9", "C_1=9, C_2=4", W),
    ("x=4, x=9", "x_1=9, x_2=4", R),
    ("x=4, y=9", "(4,9)", R),
    ("x=4, y=9", "(9,4)", W),
    ("x=4, y=9", "y=9, x=4", R),
    ("x=4, y=9", "x=9, y=4", W),
    ("x=4, y=9", "(x,y)=(4,9)", R),
    ("(4,9)", "(x,y)=(4,9)", R),
    ("(p,q)=(4,9)", "(4,9)", R),
    ("(p,q)=(4,9)", "(9,4)", W),
    ("(4,9)", "4, 9", W),
    ("(4,9)", r"\{4, 9\}", W),
    ("(2,7), (7,2)", r"(x, y) = (7, 2) \quad \text{and} \quad (2, 7)", R),
    ("(2,7), (7,2)", "(2,7)", W),
    ("a=1,b=2;a=3,b=4", "(1,2),(3,4)", R),
    ("-3,-5,6", r"b=6,\,-5,\,-3", R),
    ("c,a,b", "a,b,c", W),
    (r"1, 4, 9, \ldots, n^2", r"1,4,9,\dots,n^2", R),
    (r"1, 4, 9, \ldots, n^2", r"1, 4, \ldots, n^2", W),
    (r"5 \pm \sqrt{2}", r"5+\sqrt{2}, 5-\sqrt{2}", R),
    (r"\frac{1 \pm \sqrt{13}}{2}", r"\frac{1+\sqrt{13}}{2}", W),
    (r"\frac{1 \pm \sqrt{13}}{2}", r"\frac{1-\sqrt{13}}{2}, \frac{1+\sqrt{13}}{2}", R),
    (r"\boxed{3} boxes and \boxed{8} lids", "8", W),
    (r"\boxed{3} boxes and \boxed{8} lids", "3, 8", R),
]
NAMES: Table = [
    ("4m", "k=4m", R),
    ("4m", "m=4m", W),
    ("E = (2, 5)", "(2, 5)", R),
    ("E = (2, 5)", "(2, 6)", W),
    ("y=3x-1", "3x-1", R),
    ("y=3x-1", "3x-y=1", R),
    ("y=3x-1", "z=3x-1", W),
    ("x=8", "8=x", R),
    ("x=8", "2x=16", W),
    ("x=8", "y=8", W),
    (r"\frac{AB}{CD}=\frac{3}{5}", r"\frac{3}{5}", R),
    ("x^2+y^2=16", "16", W),
    ("x^2+y^2=16", "16=y^2+x^2", R),
    ("PQ=6, RS=7", "6, 7", R),
    (r"f(x)=x^2+1", "x^2+1", R),
    ("8", "2x=16", W),
    ("8", "8=8", W),
    (r"\log_3(81)=4", r"\log_2(16)=4", W),  # both are true
    (r"\log_3(81)=4", "5=5", W),
    (r"\log_3(81)=4", r"\log_3(81) = 4", R),
    (r"\sin 0=0, \cos 0=1", r"\sin \pi=0, \cos \pi=-1", W),
    (r"\frac{6xy}{2x}=3y", r"\frac{5xy}{5x}=y", W),
]
INTERVALS: Table = [
    ("1 < x < 6.5", "(1, 6.5)", R),
    ("1 < x < 6.5", "[1, 6.5)", W),
    ("1 < x < 6.5", "(1, 7)", W),
    (r"(-\infty, 4)", "x<4", R),
    (r"(-\infty, 4)", r"x \le 4", W),
    (r"(-\infty, 4)", "x>4", W),
    (r"t \in [\sqrt{5}, +\infty)", r"t \geq \sqrt{5}", R),
    (r"x \in [-3,8]", r"-3 \le x \le 8", R),
    (r"x \in [-3,8]", r"-3 \le y \le 8", W),
    (r"x \in [-3,8]", "[-3,8]", R),
    (r"[-3,8]", r"x \in [-3,8]", R),
    (r"x<1 \text{ or } x>5", r"(-\infty,1)\cup(5,\infty)", R),
    (r"x<1 \text{ or } x>5", r"(-\infty,1]\cup(5,\infty)", W),
    (r"(-\infty, 1]", r"(+\infty, 1]", W),
    (r"[2, \infty)", r"[2, -\infty)", W),
    (r"[2, \infty)", r"[2, \infty]", W),
    (r"[2, \infty)", r"[2, +\infty)", R),
    (r"x \ne 4", r"(-\infty,4)\cup(4,\infty)", R),
    (r"x \ne 4", r"\mathbb{R}\setminus\{4\}", R),
    (r"x \ne 4", "x != 4", R),
    (r"x \ne 4", "x = 4", W),
    (r"\{x \mid x > 6\}", r"(6,\infty)", R),
    (r"\{x \mid x > 6\}", r"[6,\infty)", W),
    (r"\{x|-4\leq x < 3\}", r"\{x|-4 \le x<3\}", R),
    (r"\{x|-4\leq x < 3\}", "[-4,3)", R),
    ("|x| < 3", "(-3, 3)", R),
    ("(-3, 3)", "|x| < 3", W),  # not solved
    ("p<q<r", "r>q>p", R),
    ("p<q<r", "p>q>r", W),
    ("x < 3", "2x < 6", W),  # not solved
    (r"[2,3)\cup[3,5]", "[2,5]", R),
    ("0<f(x)<2", "(0,2)", R),
    (r"a \in (-\infty, -1]", r"a \leqslant -1", R),
]
SPELLINGS: Table = [
    (r"\frac{1}{\sqrt{m}}", r"\sqrt{1/m}", R),
    (r"e^{9}", r"\exp(9)", R),
    (r"e^{9}", "exp(9)", R),
    (r"e^{9}", "exp(8)", W),
    (r"2-\frac{1}{\mathrm{e}}", r"2-\frac{1}{e}", R),
    (r"2-\frac{1}{\mathrm{e}}", r"2+\frac{1}{e}", W),
    ("9-i", "9.0 + -1.0i", R),
    ("9-i", "9-1i", R),
    ("9-i", "9+i", W),
    ("250", r"250\textnormal{ metres}", R),
    ("22222222200", r"22,\! 222,\! 222,\! 200", R),
    ("48351", r"48,\! 351", R),
    ("-9", "−9", R),
    ("20 x y", "20 q y", W),
    ("20 x y", "20xy", R),
    ("20", "20 x y", W),
    ("9", "−9", W),
    (r"\overline{PQ}", "PQ", R),
    (r"\overline{PQ}", "QR", W),
    (r"\overline{z}", "z", W),  # the conjugate
    (r"\vec{v}", "v", R),
    (r"\begin{pmatrix}1 & 5 \\ 2 & 6\end{pmatrix}", r"\left[\begin{array}{cc}1 & 5 \\2 & 6\end{array}\right]", R),
    (r"\begin{pmatrix}1 & 5 \\ 2 & 6\end{pmatrix}", r"\left[\begin{array}{cc}1 & 2 \\5 & 6\end{array}\right]", W),
    (r"\frac{2}{7}", r"\left( \frac{2}{7} \right)", R),
    (r"\frac{5}{8}", r"\frac{5}{8} \approx 0.625", R),
    (r"\frac{2}{3}", r"\frac{2}{3} \approx 0.667", R),
    (r"\frac{2}{3}", r"\frac{2}{3} \approx 0.7", R),
    (r"\frac{2}{3}", r"\frac{2}{3} \approx 0.66", W),  # not its rounding
    ("0.7", r"\frac{2}{3} \approx 0.7", R),
    ("17", r"x\approx 17", R),
    (r"C=\frac{dab}{da+db}", r"C = \frac{dab}{da + db}", R),
    (r"\sqrt[3]{-27}", "-3", R),
    (r"\ln|x|+C", r"\ln x+C", W),
    (r"|x|", "x", W),
    (r"\sqrt{x^2}", "|x|", R),
    (r"\neg q", "q", W),
    (r"\neg q", r"\lnot q", R),
    (r"q \land r", r"q \lor r", W),
    (r"q \to r", r"r \to q", W),
    (r"B \setminus C", r"C \setminus B", W),
    (r"77 \notin B", r"77 \in B", W),
]
CHINESE: Table = [
    ("25", "25天", R),
    ("360", "360 元", R),
    ("360", "361 元", W),
    ("8", "x=8，", R),
    ("4,7", "4，7", R),
    ("(4,7)", "（4，7）", R),
    ("8", "答案是8。", R),
    ("30000", "3万", R),
    ("3", "3万", W),
    (r"6\text{ 厘米}", r"6\text{ 米}", W),
    ("6千米", "6米", W),
    ("6千克", "6公斤", R),
    ("12", "12个苹果", W),  # not a known unit
    ("12", "12个", R),
    (r"45^\circ", "45度", R),
]
CHOICES: Table = [
    ("D", r"\text{(D) } 18", R),
    ("D", "(D) 18", R),
    ("D", "D. 18", R),
    ("D", "(C) 18", W),
    ("D", "d", R),
    (r"\textbf{(D)}\ 18", "D", R),
    (r"\textbf{(D)}\ 18", "18", R),
    (r"\textbf{(D)}\ 18", "(D) 19", W),
    (r"\text{B and D}", r"\text{D and B}", R),
    (r"\text{B and D}", r"\text{B and C}", W),
    ("BD", "B, D", R),
    ("BD", "B and D", R),
    ("BD", "DB", W),
    ("BD", "B", W),
    (r"\text{(B), (D)}", "B, D", R),
    ("(B)", "B", R),
    ("B", "A, B", W),
]
TABLES: dict[str, Table] = {
    "exact values": EXACT,
    "times and dates": TIMES_AND_DATES,
    "ratios": RATIOS,
    "bases": BASES,
    "primes": PRIMES,
    "lists": LISTS,
    "names": NAMES,
    "intervals": INTERVALS,
    "spellings": SPELLINGS,
    "chinese": CHINESE,
    "choices": CHOICES,
}


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(MathOptions(timeout_seconds=10.0))
    yield made
    made.close()


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("form", [r"\boxed{{{}}}", r"So it is $\boxed{{{}}}$.", "\n#### {}"])
def test_answers_of_each_kind_get_the_verdict_of_a_person(
    reward: MathReward, make_rollout: Callable[..., Rollout], kind: str, form: str
) -> None:
    table = TABLES[kind]
    scores = reward([make_rollout(form.format(answer), reference) for reference, answer, _ in table])
    found = [(*row[:2], score.value, score.error) for row, score in zip(table, scores, strict=True)]
    assert [row for row, (*_, verdict) in zip(found, table, strict=True) if row[2] != verdict] == []


UNMARKED: Table = [
    ("7", "so it is −7.", W),
    ("-7", "so it is −7.", R),
    ("-7", "so it is –7.", R),
    ("4", "so we lose -$4.", W),
    ("-4", "so it is $-$4.", R),
    ("9", "the balance is minus 9 euros.", W),
    ("-9", "the balance is negative 9.", R),
    (r"35\%", "That makes 35 %.", R),
    (r"35\%", "That makes 35 percent.", R),
    ("35", "That makes 35 %.", W),
    ("3", "It costs 3 million.", W),
    ("3000000", "It costs 3 million.", R),
    ("5", "It is √5.", W),
    ("5", "It is 2√5.", W),
    (r"\sqrt{5}", "It is √5.", R),
    ("8", "It is 3 / 8.", W),
    (r"\frac{3}{8}", "It is 3 / 8.", R),
    ("45", "At 7:45.", W),
    ("100000", "It is 10^5", R),
    ("5", "It is 10^5", W),
    ("8", "It is (3, 8).", W),
    ("(3, 8)", "It is (3, 8).", R),
    ("8", "The roots are 3 and 8.", W),
    ("3, 8", "The roots are 3 and 8.", R),
    ("8", "It is 3 or 8.", W),
    ("2", "It is 9 - 2.", W),
    ("8", "It is 8x.", W),
    ("8", "It is not 8.", W),
    ("8", "It is at least 8.", W),
    ("8", "That is half of 8.", W),
    (r"8\text{ m}", "It is 8 km.", W),
    (r"8\text{ km}", "It is 8 km.", R),
    ("50", "She pays 7 dollars and 50 cents.", W),
    ("15", "3 * 5 = 15 apples.", R),
    ("15", "**15**", R),
    ("8", r"\(x = 8\)", R),
    ("1.5", "It takes 1 1/2 hours.", R),
    ("120", "It's 120!", R),
    ("25", "一共25天。", R),
    ("64", "#### 64 stickers, all in all", R),
]
OPEN: Table = [
    ("6", r"First \boxed{6}, and therefore \boxed{", W),
    ("6", r"First \boxed{6}, and therefore \boxed{7", W),
    ("6", "<answer>6</answer> or rather <answer>7", W),
    ("6", r"\boxed{6", W),
    ("6", r"\boxed{4} or \boxed{6}", W),
    ("4, 6", r"\boxed{4} or \boxed{6}", R),
    ("4, 6", r"\boxed{4}, \boxed{6}", R),
    ("6", r"\boxed{4}. No, it is \boxed{6}.", R),
    ("(4,4), (6,2)", r"\boxed{(4, 4)} \text{ for part (a) and } \boxed{(6, 2)}", R),
]


@pytest.mark.parametrize("table", [UNMARKED, OPEN], ids=["unmarked", "open"])
def test_a_number_in_running_text_is_read_whole_or_not_at_all(
    reward: MathReward, make_rollout: Callable[..., Rollout], table: Table
) -> None:
    scores = reward([make_rollout(answer, reference) for reference, answer, _ in table])
    found = [(*row[:2], score.value) for row, score in zip(table, scores, strict=True)]
    assert [row for row, (*_, verdict) in zip(found, table, strict=True) if row[2] != verdict] == []
