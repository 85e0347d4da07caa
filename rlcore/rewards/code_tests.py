"""Reward of programs by tests in a sandbox. The result is decided outside of the program's process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rlcore.config import Duration, PositiveInt
from rlcore.rewards.answers import final_part, marked_answers
from rlcore.rewards.base import failed_score, scored
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import Backend, Job, SandboxPool
from rlcore.sandbox.program_check import MAX_REPEATS
from rlcore.sandbox.suite import best_constant, parse_suite
from rlcore.types import Rollout, Score

MAX_CODE_CHARACTERS = 100_000
# Possessive: each line is read once.
_FENCE = re.compile(r"^(?P<indent>(?:[ \t]|> ?)*+)(?P<mark>`{3,}+|~{3,}+)(?P<info>[^`\n]*+)$", re.MULTILINE)
# A fence after text: Code: ```python, and one directly after the last line of a program.
_OPENED_BEHIND = re.compile(r"(?<=[^\s`])[ \t]*(```(?:python|py)[0-9.]*[ \t]*)$", re.IGNORECASE | re.MULTILINE)
_CLOSED_BEHIND = re.compile(r"(?<=[^\s`])(```)[ \t]*$", re.MULTILINE)
_PYTHON = re.compile(r"\{?\.?(?:python|py|pypy|ipython)[0-9.]*\b.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """Options of the reward ``code``.

    Attributes:
        credit: ``all`` is 1.0 for a program that passes every test, else 0.0. ``share`` is the fraction of tests passed
            beyond those that one constant answer passes.
        timeout_seconds: Limit per test.
        backend: ``unprotected`` runs programs with all rights of this user.
    """

    credit: Literal["all", "share"] = "all"
    timeout_seconds: Duration = 5.0
    num_workers: PositiveInt = 2
    backend: Backend = "bubblewrap"


class CodeReward:
    """1.0 for a program (:func:`find_program`) that passes all tests, else 0.0, or with ``share`` a fraction.

    ``rollout.prompt.reference`` is the JSON of ``code_tasks/v1``. If the sandbox fails, not the program, the
    rollout is unscored.
    """

    name = "code"

    def __init__(self, options: CodeOptions | None = None, *, prefill: str = "") -> None:
        self._options, self._prefill = options or CodeOptions(), prefill
        self._pool = SandboxPool(num_workers=self._options.num_workers, backend=self._options.backend)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score a batch.

        Raises:
            SandboxError: Programs cannot be isolated on this machine.
        """
        prepared = [self._prepare(rollout) for rollout in rollouts]
        jobs = list(dict.fromkeys(item for item in prepared if isinstance(item, Job)))  # equal programs run once
        outcomes = dict(zip(jobs, self._pool.check_all(jobs), strict=True)) if jobs else {}
        return [self._score(item, outcomes[item]) if isinstance(item, Job) else item for item in prepared]

    def close(self) -> None:
        self._pool.close()

    def _prepare(self, rollout: Rollout) -> Job | Score:
        try:
            suite = parse_suite(rollout.prompt.reference)
        except ValueError as error:
            return failed_score(f"the reference is not a code task: {error}")
        code = find_program(self._prefill + rollout.text)
        if code is None or not code.strip() or len(code) > MAX_CODE_CHARACTERS:
            return scored(self.name, 0.0)
        seconds = self._options.timeout_seconds
        # One process serves all tests of a program, so its CPU time is bounded by their sum.
        limits = ResourceLimits(wall_seconds=seconds, cpu_seconds=1 + int(seconds * max(len(suite.tests), MAX_REPEATS)))
        stop_early = self._options.credit == "all"
        return Job(reference=rollout.prompt.reference, code=code, limits=limits, stop_early=stop_early)

    def _score(self, job: Job, outcomes: Sequence[RunResult]) -> Score:
        failed = next((one for one in outcomes if one.status is RunStatus.INFRA), None)
        if failed is not None:
            return failed_score(f"the sandbox failed: {failed.error}")
        passed = sum(one.status is RunStatus.PASS for one in outcomes)
        free = _passed_by_a_constant(job.reference)
        if self._options.credit == "all" or passed == len(outcomes) or free == len(outcomes):
            return scored(self.name, float(passed == len(outcomes)))
        return scored(self.name, max(passed - free, 0) / (len(outcomes) - free))


@lru_cache(maxsize=256)
def _passed_by_a_constant(reference: str) -> int:
    return best_constant(parse_suite(reference))


def find_program(text: str) -> str | None:
    """Return the program of a completion: its last closed Python block after the thinking.

    A block without a language counts only if no fence names Python. Without fences, the program is the content of
    ``<answer>``, else the whole text (of a base model that continues a prompt).
    """
    part = final_part(text)
    if part is None:
        return None
    part = part.replace("\ufeff", "")
    if (found := _fenced(part)) is not None:
        return found
    separated = _CLOSED_BEHIND.sub(r"\n\1", _OPENED_BEHIND.sub(r"\n\1", part))
    if _FENCE.search(separated):
        return _fenced(separated)
    answers = [marked for marked in marked_answers(part) if marked.kind == "tag"]
    return part[slice(*answers[-1].inner)] if answers else part


def _fenced(text: str) -> str | None:
    named, unnamed, opened = None, None, None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif _closes(fence, opened):
            language = opened["info"].strip().lower()
            if _PYTHON.fullmatch(language):
                named = _block(text, opened, fence)
            elif not language:
                unnamed = _block(text, opened, fence)
            opened = None
    return unnamed if named is None else named


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    is_same = fence["mark"].startswith(opened["mark"]) and not fence["info"].strip()
    return is_same and len(fence["indent"]) <= len(opened["indent"]) + 3


def _block(text: str, opened: re.Match[str], closing: re.Match[str]) -> str:
    block = text[opened.end() + 1 : closing.start()]
    width, quotes = len(opened["indent"]), opened["indent"].count(">")
    before = f"(?:> ?){{{quotes}}}" if quotes else f"[ \\t]{{1,{width}}}"
    return re.sub(f"^{before}", "", block, flags=re.MULTILINE) if width else block
