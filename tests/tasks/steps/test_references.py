"""References that grade nobody are refused where they grade: each is tried once, within a bound."""

from __future__ import annotations

import json

import pytest

from rlcore.tasks.presets.graph import FUNCTION, Graders
from rlcore.tasks.steps import references
from rlcore.tasks.steps.references import references_screen, unusable

MATH = Graders(kinds=("math",))
REWARD = Graders(kinds=("math",), are_rewards=True)
PROBLEM = '{"dataset": "chain_sum", "entry": {"question": "1 + 2?", "answer": "3", "metadata": {}}}'
WRONG = json.dumps(
    {"dataset": "countdown", "entry": {"question": "", "answer": "1 + 1", "metadata": {"numbers": [3, 4], "target": 7}}}
)  # its scorer computes the answer
TASK = '{"style": "stdin", "tests": [{"input": "1", "output": "2"}]}'
FOREIGN = [
    PROBLEM,
    TASK,
    '{"func_name": "validate_lowercase", "N": 3}',
    "{'a': 1}",
    '[{"role": "user"}]',
    '["assert f(1) == 2", "assert f(2) == 3"]',
    "['assert f(1) == 2']",
    "assert f(1) == 2",
    "def f(x):\n    return x + 1",
    "import math\nprint(math.pi)",
    "```python\nx\n```",
    "print(1)",
    "None",
]
SOUND = ["72", "x=5", "{1, 2}", r"\{1,2\}", "[1, 2]", '["4", "four"]', "f(1)", "Paris", "true", "A", "[[1, 2], [3, 4]]"]


def test_a_reference_that_is_wrong_as_its_own_answer_or_of_another_grader_is_refused_with_the_reason() -> None:
    bad = [*FOREIGN, "proof", r"\frac{1}{0}"]
    with references_screen(MATH) as screen:
        found = screen([*SOUND, "", *bad])
    assert sorted(found) == list(range(len(SOUND) + 1, len(SOUND) + 1 + len(bad)))
    assert all(reason.startswith("no answer can be graded with it") for reason in found.values())


@pytest.mark.parametrize(
    ("graders", "refused"),
    [
        (REWARD, {"", PROBLEM, TASK, WRONG}),
        (MATH, {PROBLEM, TASK, WRONG}),
        (Graders(kinds=("math", "procedural")), {TASK, WRONG}),
        (Graders(kinds=("procedural",)), {"72", TASK, WRONG}),
        (Graders(kinds=("code",)), {"72", PROBLEM, WRONG}),
        (Graders(kinds=("math", FUNCTION)), set()),
    ],
)
def test_one_of_a_datasets_graders_has_to_read_it(graders: Graders, refused: set[str]) -> None:
    rows = ["72", "", PROBLEM, TASK, WRONG]
    found = unusable(rows, graders, {})
    assert {rows[place] for place in found} == refused
    if "procedural" in graders.kinds:
        assert "because it is wrong as its own answer under the reward `procedural`" in found[4]


def test_a_reference_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(references, "reference_errors", lambda some: [tried.append(each) or "" for each in some])
    known: dict[str, str] = {}
    for _ in range(3):
        assert unusable(["x+1", "x+1", "y"], MATH, known) == {}
    assert tried == ["x+1", "y"]


def test_beyond_the_bound_the_text_alone_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_TRIED", 1)
    monkeypatch.setattr(references, "reference_errors", lambda some: ["" for _ in some])
    found = unusable(["x+1", "proof", "y"], MATH, {})
    assert list(found) == [1]
