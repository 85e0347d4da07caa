"""Code and packages of reward functions in the keys of stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlcore.config import RewardTerm
from rlcore.errors import ConfigError, StorageError
from rlcore.rewards import other_interpreter
from rlcore.tasks.steps import external
from rlcore.tasks.steps.external import terms_digests


@pytest.fixture
def term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardTerm:
    (tmp_path / "their_rewards.py").write_text("def f(completions): return [1.0 for _ in completions]")
    monkeypatch.syspath_prepend(tmp_path)
    return RewardTerm(kind="their_rewards:f", python=sys.executable)


def test_a_function_counts_with_its_file_and_the_packages_of_its_interpreter(
    term: RewardTerm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = terms_digests([term, term])
    assert [name for name, _ in first] == ["their_rewards.py", f"packages of {sys.executable}"]
    assert terms_digests([term]) == first
    newer = {**other_interpreter.packages(sys.executable, ""), "verifiers": "0.5.0"}
    monkeypatch.setattr(external, "packages", lambda *_: newer)
    changed = terms_digests([term])
    assert [name for (name, old), (_, new) in zip(first, changed, strict=True) if old != new] == [first[1][0]]


def test_a_function_that_only_the_other_interpreter_has_counts_with_its_packages(term: RewardTerm) -> None:
    absent = RewardTerm(kind="only_there:f", python=term.python)
    assert [name for name, _ in terms_digests([absent])] == [f"packages of {sys.executable}"]
    with pytest.raises(StorageError, match="only_there"):
        terms_digests([RewardTerm(kind="only_there:f")])


def test_an_interpreter_that_is_gone_is_named(term: RewardTerm) -> None:
    with pytest.raises(ConfigError, match="no such program"):
        terms_digests([RewardTerm(kind=term.kind, python="no-such-python")])
